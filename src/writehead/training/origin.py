"""The runs that a training starts from: its initial weights, and a teacher to distill."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from writehead.config import ModelConfig
from writehead.data.dataset import Dataset
from writehead.data.tokenizer import has_tokenizer, load_tokenizer
from writehead.errors import ConfigError, shown
from writehead.interop.pretrained import RunFacts, load_run, read_config
from writehead.model import LanguageModel, TranslationModel


@dataclass(frozen=True)
class Origin:
    """A run with the initial weights, and a run that teaches its predictions; None: neither."""

    init: Path | None = None
    teacher: Path | None = None

    def fingerprints(self) -> dict[str, str | None]:
        """Identifies the weights of both runs."""
        return {name: run and RunFacts.read(run).fingerprint for name, run in vars(self).items()}

    def check(self, data: Dataset, model: ModelConfig) -> None:
        """Raises ConfigError unless both runs fit the dataset and the model to train."""
        if self.init is not None:
            _check_vocabulary(self.init, data)
            config = read_config(self.init)
            for name, value in replace(config, dropout=model.dropout).to_json().items():
                wanted = getattr(model, name)
                if value != wanted:
                    raise ConfigError(
                        f"model.{name} is {shown(wanted)}, but {self.init} has {shown(value)}; "
                        f"only dropout may differ from the initial run"
                    )
        if self.teacher is not None:
            _check_vocabulary(self.teacher, data)
            config = read_config(self.teacher)
            sizes = ("task", "vocab_size", "source_vocab_size", "pad", "bos", "eos")
            for name in sizes:
                value, wanted = getattr(config, name), getattr(model, name)
                if value != wanted:
                    raise ConfigError(
                        f"the teacher {self.teacher} has {name}={shown(value)}, but the model has "
                        f"{shown(wanted)}; choose another teacher"
                    )

    def read_teacher(
        self, device: torch.device, dtype: torch.dtype
    ) -> TranslationModel | LanguageModel | None:
        """Returns the teacher in evaluation mode, without gradients."""
        if self.teacher is None:
            return None
        teacher = load_run(self.teacher, device=device, dtype=dtype).model
        return teacher.requires_grad_(False)


def _check_vocabulary(run: Path, data: Dataset) -> None:
    """Raises ConfigError if the tokenizer of a run is not that of the dataset."""
    if has_tokenizer(run) and load_tokenizer(run).fingerprint != data.tokenizer.fingerprint:
        raise ConfigError(
            f"{run} has another vocabulary than the dataset; prepare the text with the tokenizer "
            f"of that run"
        )
