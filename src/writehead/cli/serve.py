"""`writehead serve`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from writehead.cli.app import app
from writehead.cli.options import DEFAULT, Device, Dtype, Quantize, Threads
from writehead.errors import ConfigError, shown

if TYPE_CHECKING:  # these modules import PyTorch, which takes seconds
    from writehead.engine import Engine
    from writehead.serving.models import Served

KEY_VARIABLE = "WRITEHEAD_API_KEY"
COMPARED = "-compare"  # follows the name of a second model with the same name


@app.command(name="serve")
def serve_command(
    runs: Annotated[
        list[str] | None,
        Argument(
            metavar="[RUN]…",
            help="Folders of runs or Hugging Face models, or hub names." + DEFAULT,
        ),
    ] = None,
    host: Annotated[str, Option(help="Address to listen on. 0.0.0.0: all interfaces.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Option(min=0, max=65535, help="Port. 0 chooses a free one.")] = 8000,
    names: Annotated[
        list[str] | None,
        Option(
            "--served-model-name",
            help="Name of each run in turn. Repeatable. Default: the name of its folder.",
        ),
    ] = None,
    languages: Annotated[
        list[str] | None,
        Option(
            help="Languages of each run in turn, such as en-de. Repeatable. Default: the end of "
            "its name."
        ),
    ] = None,
    compare: Annotated[
        str | None,
        Option(metavar="RUN", help="Also load a run that races the first one on the page."),
    ] = None,
    keys: Annotated[
        list[str] | None,
        Option(
            "--api-key",
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="Accept only requests with this key. Repeatable.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        Option(min=1, help="Maximum sequences × beams decoded together. Default on a CPU: 64."),
    ] = None,
    max_queue: Annotated[
        int, Option(min=1, help="Sequences that may wait for a slot; more get status 429.")
    ] = 1024,
    max_characters: Annotated[
        int, Option(min=1, help="Characters per request; more get status 422.")
    ] = 50_000,
    max_body: Annotated[int, Option(min=1, help="Bytes per request; more get status 413.")] = 1
    << 20,
    deadline: Annotated[
        float, Option(help="Seconds per request; a longer one gets status 504.")
    ] = 60.0,
    grace: Annotated[
        int, Option(min=0, help="Seconds to finish requests after SIGTERM or Ctrl-C.")
    ] = 30,
    origins: Annotated[
        list[str] | None,
        Option("--allow-origin", help="Origin whose pages may call the server. Repeatable."),
    ] = None,
    log_text: Annotated[bool, Option("--log-text", help="Also log the texts of requests.")] = False,
    device: Device = "auto",
    dtype: Dtype = None,
    quantize: Quantize = "auto",
    threads: Threads = None,
) -> None:
    """Serve models over HTTP, with continuous batching and a page to try them.

    Example: writehead serve runs/ende --api-key secret

    Clients of OpenAI, LibreTranslate and DeepL can use the server; see docs/serving.md. It writes
    one JSON line per request to standard output.
    """
    from writehead.engine import Engine
    from writehead.serving.run import limit_batch, listen, run_server
    from writehead.serving.settings import Limits, Settings
    from writehead.util.threads import run_alone

    limits = Limits(
        body_bytes=max_body,
        characters=max_characters,
        queue=max_queue,
        deadline=deadline,
        grace=grace,
    )
    socket = listen(host, port)  # before the models, which take seconds to load
    load = partial(Engine.load, device=device, dtype=dtype, quantize=quantize)
    models = run_alone(lambda: _load(runs or [], names or [], languages or [], load))
    if compare is not None:
        used = {one.name for one in models}
        name = Path(compare).resolve().name
        name += COMPARED if name in used else ""
        models += run_alone(lambda: _load([compare], [name], [], load))
    for one in models:
        limit_batch(one.engine, max_batch)
    settings = Settings(
        limits=limits,
        keys=tuple(keys or ()),
        origins=tuple(origins or ()),
        log_text=log_text,
        compare=None if compare is None else models[-1].name,
    )
    run_server(models, settings, socket)


def _load(
    runs: list[str], names: list[str], languages: list[str], load: "Callable[[str], Engine]"
) -> "list[Served]":
    """Loads runs, or the bundled model."""
    from writehead.runs.bundled import bundled_run
    from writehead.serving.models import Served, pair_of, parse_pair

    paths = runs or [str(bundled_run())]
    for option, given in (("--served-model-name", names), ("--languages", languages)):
        if given and len(given) != len(paths):
            counts = f"{_count(len(given), 'time')} for {_count(len(paths), 'run')}"
            raise ConfigError(f"{option} is given {counts}; pass it once per run, or omit it")
    names = names or [Path(path).resolve().name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two runs are named {shown(name)}; pass --served-model-name once per run"
            )
    models = []
    for i, path in enumerate(paths):
        pair = parse_pair(languages[i]) if languages else pair_of(names[i])
        served = Served(names[i], load(path), pair)
        if languages and not served.translates:
            raise ConfigError(f"{path} is a language model, without languages; omit --languages")
        models.append(served)
    return models


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")
