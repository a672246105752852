"""`writehead translate` with an output folder: many files, in shards, on one or more machines."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from writehead.config import Batching, DecodeConfig
from writehead.data.inputs import find_inputs, is_pattern
from writehead.errors import ConfigError, DataError

if TYPE_CHECKING:  # these modules import PyTorch, which takes seconds
    from writehead.bulk.job import Job
    from writehead.bulk.pool import PoolSpec, WorkerPool
    from writehead.bulk.translator import Translation
    from writehead.util.progress import Reporter

PANEL = "Many files, with an output folder"
BULK_ONLY = ("shards", "shard", "devices", "cluster", "field", "output_field")
SINGLE_FILE_ONLY = ("prefix_file", "n_best")
# suffixes of input files that need an output folder, and of names that are not folders
NOT_PLAIN = (".jsonl", ".ndjson", ".parquet", ".gz", ".xz", ".bz2")
FILES = (*NOT_PLAIN, ".txt", ".json", ".csv", ".tsv")

Shards = Annotated[
    int | None,
    Option(
        min=1,
        max=99_999,
        rich_help_panel=PANEL,
        help="Number of parts, which are finished one by one. Default: one per 10,000 lines, or "
        "100,000 on a GPU.",
    ),
]
Shard = Annotated[
    str | None,
    Option(
        metavar="I/N",
        rich_help_panel=PANEL,
        help="Translate every N-th shard, starting with the I-th; 1/8 on the first of 8 machines.",
    ),
]
Devices = Annotated[
    str | None,
    Option(
        rich_help_panel=PANEL,
        help="One process per device: 0,1 for two GPUs, all for every GPU, or cpu,cpu.",
    ),
]
Cluster = Annotated[
    str | None,
    Option(
        rich_help_panel=PANEL,
        help="ray: use the Ray cluster of this machine, or start one. ray://HOST:PORT: connect to "
        "a remote cluster.",
    ),
]
Field = Annotated[
    str | None,
    Option(
        rich_help_panel=PANEL,
        help="Field (.jsonl) or column (.parquet) to translate. Default: text.",
    ),
]
OutputField = Annotated[
    str | None,
    Option(rich_help_panel=PANEL, help="Field or column to add. Default: translation."),
]


def is_bulk(given: dict[str, Any]) -> bool:
    """Returns whether `translate` writes a folder; raises ConfigError if the options conflict."""
    output, read = given["output_path"], given["input_path"]
    option = next((name for name in BULK_ONLY if given[name] is not None), None)
    several = read != "-" and (os.path.isdir(read) or is_pattern(read))
    is_folder = output.endswith(os.sep) or os.path.isdir(output)
    if not (option or several or is_folder):
        if read.lower().endswith(NOT_PLAIN):
            raise ConfigError(
                f"{read} is not plain text; pass a folder as output, such as --output out/"
            )
        return False
    reason = f"--{option.replace('_', '-')}" if option else "an input of several files"
    if output == "-":
        raise ConfigError(f"{reason} needs an output folder; pass one with --output")
    if read == "-":
        reason = reason if option else "an output folder"
        raise ConfigError(f"{reason} needs files to read; pass a file or folder with --input")
    if not is_folder and (output.lower().endswith(FILES) or os.path.exists(output)):
        kind = "a file" if os.path.exists(output) else "the name of a file"
        raise ConfigError(
            f"{reason} needs an output folder, but {output} is {kind}; pass a folder, "
            f"such as --output out/"
        )
    for name in SINGLE_FILE_ONLY:
        if given[name] is not None:
            refused = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{refused} needs an output file, not a folder; omit {refused}")
    if given["devices"] is not None and given["cluster"] is not None:
        raise ConfigError("--cluster uses all machines of a cluster; omit --devices")
    if given["device"] != "auto" and (given["devices"] or given["cluster"]):
        other = "--devices" if given["devices"] else "--cluster"
        raise ConfigError(f"--device cannot be combined with {other}; omit --device")
    return True


def translate_files(given: dict[str, Any], config: DecodeConfig) -> None:
    """Translates files in shards, or resumes an interrupted job."""
    from writehead.bulk.job import JobMismatch, Plan, check_output, open_job
    from writehead.bulk.pool import WorkerPool
    from writehead.cli.textio import plural
    from writehead.data.parquet import load_pyarrow
    from writehead.data.records import RecordFormat
    from writehead.util.progress import Reporter

    output, part = Path(given["output_path"]), _parse_shard(given["shard"])
    files, report = find_inputs(given["input_path"], output), Reporter()
    format = RecordFormat(
        field=given["field"] or "text",
        output_field=given["output_field"] or "translation",
        scores=given["scores"],
        errors=given["errors"],
    )
    with ExitStack() as stack, _write_errors(output):
        check_output(output, files, force=given["force"])  # before the model is loaded
        if any(file.name.lower().endswith(".parquet") for file in files):
            load_pyarrow()
        translation = _translation(given, config)
        spec = _workers_for(given, translation, stack)
        pool = stack.enter_context(WorkerPool(spec))
        plan = Plan(
            pool.identity(),
            translation.to_json(),
            format,
            given["shards"],
            workers=len(spec.factories),
            on_cpu=spec.on_cpu,
        )
        try:
            with report.stage("reading the input") as progress:
                job = open_job(output, files, plan, progress, force=given["force"])
            if job.is_joined and job.join():
                report.say(f"{output} is complete; there is nothing to do")
                return
            if invalid := sum(entry["invalid"] for entry in job.manifest["inputs"]):
                lines = plural(invalid, "line")
                report.say(f"{lines} with invalid UTF-8: --errors {format.errors}")
            with _reported_on_error(job, report):
                _run(job, pool, job.shards[part], report, replace=given["force"])
        except JobMismatch as error:
            raise DataError(f"{error} with --force") from error


def _run(
    job: "Job", pool: "WorkerPool", shards: Sequence[int], report: "Reporter", *, replace: bool
) -> None:
    from writehead.cli.textio import plural
    from writehead.util.garbage import frozen_objects

    done = sum(map(job.is_finished, job.shards))
    if done:
        report.say(f"resuming: {done:,} of {plural(len(job.shards), 'shard')} finished")
    with report.lines(job.lines(shards)) as progress, frozen_objects():
        in_pieces = pool.run(job, shards, progress)
    if in_pieces:
        lines = f"{plural(in_pieces, 'line')} longer than the model's limit"
        report.say(f"{lines} {'was' if in_pieces == 1 else 'were'} translated in pieces")
    left = len(job.shards) - sum(map(job.is_finished, job.shards))
    if left:
        report.say(
            f"finished {plural(len(shards), 'shard')}; {left:,} of {len(job.shards):,} are left "
            f"for other processes; the last process writes the output files"
        )
        return
    with report.stage("writing the output files"):
        joined = job.join(replace=replace)
    if joined:
        files = plural(len(job.files), "file")
        report.say(f"translated {plural(job.lines(), 'line')}; wrote {files} to {job.output}")
    else:
        report.say(f"another process is writing the output files to {job.output}")


def _translation(given: dict[str, Any], config: DecodeConfig) -> "Translation":
    from writehead.bulk.translator import Translation

    run = given["run"]  # machines of a cluster may have other working directories
    run = Path(run).absolute() if run is not None and os.path.isdir(run) else run
    names = ("source_lang", "target_lang", "device", "dtype", "threads", "quantize")
    batching = Batching(tokens=given["batch_tokens"])
    return Translation(run, config, batching=batching, **{name: given[name] for name in names})


def _workers_for(given: dict[str, Any], translation: "Translation", stack: ExitStack) -> "PoolSpec":
    """Returns the workers that the options request."""
    from writehead.bulk.pool import PoolSpec
    from writehead.bulk.processes import device_names, process_workers
    from writehead.bulk.worker import Worker
    from writehead.util.devices import find_device

    if given["cluster"] is not None:
        from writehead.bulk.cluster import connected, ray_workers

        stack.enter_context(connected(_address(given["cluster"])))
        return ray_workers(translation)
    devices = [given["device"]] if given["devices"] is None else device_names(given["devices"])
    if len(devices) > 1:
        return process_workers(translation, devices)
    translation = replace(translation, device=devices[0])
    on_cpu = find_device(devices[0]).type == "cpu"
    return PoolSpec([lambda: Worker(translation.load())], on_cpu)


def _address(cluster: str) -> str | None:
    """Returns the address of a Ray cluster; None means the cluster of this machine."""
    if cluster in ("ray", "ray://"):
        return None
    if not cluster.startswith("ray://"):
        raise ConfigError(f"--cluster {cluster} must be ray or ray://HOST:PORT")
    return cluster


def _parse_shard(text: str | None) -> slice:
    """Returns the slice of shards that --shard I/N selects."""
    if text is None:
        return slice(None)
    match = re.fullmatch(r"0*(\d{1,9})/0*(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard {text} must be I/N with I from 1 to N, such as 1/8")
    return slice(int(match[1]) - 1, None, int(match[2]))


@contextmanager
def _write_errors(output: Path) -> Iterator[None]:
    """Turns OSErrors of the block into DataErrors that name the file or the output folder."""
    try:
        yield
    except OSError as error:
        place = error.filename or output
        raise DataError(f"{place} could not be written: {error.strerror or error}") from error


@contextmanager
def _reported_on_error(job: "Job", report: "Reporter") -> Iterator[None]:
    """After an interruption or an error, prints how many shards are finished."""
    try:
        yield
    except BaseException as error:
        done, total = sum(map(job.is_finished, job.shards)), len(job.shards)
        if done or isinstance(error, KeyboardInterrupt | SystemExit):
            report.say(
                f"{done:,} of {total:,} shards finished and kept; run the same command again to "
                f"resume"
            )
        raise
