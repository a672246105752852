"""The runs that training starts from: its initial weights, and a teacher to distill."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from writehead.config import ModelConfig
from writehead.data.dataset import Dataset
from writehead.data.tokenizer import Files, has_tokenizer, load_tokenizer
from writehead.errors import ConfigError, shown
from writehead.interop.pretrained import RunFacts, load_run, read_config, read_source
from writehead.model import LanguageModel, TranslationModel


@dataclass(frozen=True)
class Origin:
    """A run with the initial weights, and a run that is the teacher; either may be None."""

    init: Path | None = None
    teacher: Path | None = None

    def fingerprints(self) -> dict[str, str | None]:
        """Identifies the weights of both runs."""
        return {name: run and RunFacts.read(run).fingerprint for name, run in vars(self).items()}

    def check_tokenizers(self, data: Dataset) -> None:
        """Raises ConfigError unless both runs have the tokenizer of the dataset, or none."""
        for run in (self.init, self.teacher):
            if run is not None and has_tokenizer(run):
                _check_tokenizer(run, data)

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError unless both runs fit the model to train."""
        if self.init is not None:
            config = read_config(self.init)
            for name, value in replace(config, dropout=model.dropout).to_json().items():
                wanted = getattr(model, name)
                if value != wanted:
                    raise ConfigError(
                        f"model.{name} is {shown(wanted)}, but {self.init} has {shown(value)}; "
                        f"only dropout may differ from the initial run"
                    )
        if self.teacher is not None:
            config = read_config(self.teacher)
            sizes = ("task", "vocab_size", "source_vocab_size", "pad", "bos", "eos")
            for name in sizes:
                value, wanted = getattr(config, name), getattr(model, name)
                if value != wanted:
                    raise ConfigError(
                        f"the teacher {self.teacher} has {name}={shown(value)}, but the model has "
                        f"{shown(wanted)}; choose another teacher"
                    )

    def files(self) -> Files:
        """Returns what an imported initial run needs to be exported to its own format again."""
        return {} if self.init is None else read_source(self.init).files

    def read_teacher(
        self, device: torch.device, dtype: torch.dtype
    ) -> TranslationModel | LanguageModel | None:
        """Returns the teacher in evaluation mode, without gradients."""
        if self.teacher is None:
            return None
        teacher = load_run(self.teacher, device=device, dtype=dtype).model
        return teacher.requires_grad_(False)


def _check_tokenizer(run: Path, data: Dataset) -> None:
    if load_tokenizer(run).fingerprint != data.tokenizer.fingerprint:
        raise ConfigError(
            f"{run} has another tokenizer than {data.directory}; prepare the text again with the "
            f"tokenizer of {run}"
        )
