"""`writehead convert`."""

from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from writehead import cost
from writehead.cli.app import Page, app
from writehead.cli.options import A_RUN, ForceRun, NewRun, Threads, check_new_run
from writehead.config import ModelConfig
from writehead.explain import size


@app.command(name="convert")
def convert_command(
    run: Annotated[Path, Argument(help=A_RUN)],
    output: NewRun,
    write_heads: Annotated[
        int, Option(help="Write-heads (KV heads) of the new run: 1 is multi-query.")
    ],
    method: Annotated[
        str,
        Option(
            help="aligned: group similar heads, rotate them onto each other, and average. "
            "low-rank: group similar heads, and approximate their products. mean, first: the mean "
            "or the first of neighbouring heads."
        ),
    ] = "aligned",
    widen: Annotated[
        bool, Option("--widen", help="Enlarge d_ff to keep the number of parameters.")
    ] = False,
    encoder: Annotated[
        bool, Option("--encoder", help="Also convert the encoder's self-attention.")
    ] = False,
    chip: Annotated[
        str, Option(help=f"Chip to predict times for: {', '.join(cost.CHIPS)}.")
    ] = "h200",
    force: ForceRun = False,
    threads: Threads = None,
) -> None:
    """Convert multi-head attention to multi-query or grouped-query attention.

    Converts the decoder's self-attention and cross-attention. Afterwards, train the new run for
    some steps with `writehead train DATASET --init OUTPUT --teacher RUN`.

    Example: writehead convert runs/ende/wmt14-small/multi-head converted --write-heads 1
    """
    target = cost.find_chip(chip)
    check_new_run(output, force)
    from writehead.interop.convert import convert  # imports PyTorch, which takes seconds

    done = convert(
        run,
        output,
        write_heads=write_heads,
        method=method,  # type: ignore[arg-type]  # checked there
        widen=widen,
        encoder=encoder,
        overwrite=force,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    columns = [_facts(config, target) for config in (done.before, done.after)]
    for label, before in columns[0].items():
        table.add_row(label, before, columns[1][label])
    Page(highlight=False).print(table)


def _facts(config: ModelConfig, chip: cost.Chip) -> dict[str, str]:
    """Returns what a conversion changes; times are the lower bounds of `explain`."""
    target = min(128, config.target_positions)
    source = min(128, config.source_positions)
    setting = cost.Setting(batch=1024, source=source, target=target)
    kv = cost.kv_bytes(config, setting)
    tokens = setting.batch * target
    floor = cost.decoder_sequence(config, setting).floor(chip) * 1e6 / tokens
    facts = {"write-heads, self-attention": str(config.g)}
    if config.encoder_layers:
        facts["write-heads, cross-attention"] = str(config.cross_attention.g)
        facts["write-heads, encoder"] = str(config.encoder_attention.g)
    facts["d_ff"] = str(config.f)
    facts["parameters"] = f"{sum(cost.parameters(config).values()):,}"
    facts["K and V per target token"] = size(kv["target_token"])
    if config.encoder_layers:
        facts["K and V per source token"] = size(kv["source_token"])
    lengths = f"{source} + {target}" if source else str(target)
    facts[f"minimum µs/token, 1,024 × ({lengths}), {chip.name}"] = f"{floor:.3g}"
    return facts
