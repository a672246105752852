"""§4.2-4.3: the paper's own figures, as data. None of them was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table1Row:
    """WMT14 EN-DE quality; the test BLEU was printed for some rows only."""

    row: str
    h: int
    k: int
    f: int
    ln_ppl_dev: float
    bleu_dev: float
    bleu_test_greedy: float | None = None
    bleu_test_beam4: float | None = None


@dataclass(frozen=True)
class Table2Row:
    """TPUv2-microseconds a token: training, and encoder + decoder by greedy and beam-4 search."""

    row: str
    training: float
    encoder: float
    decoder: float
    beam4_encoder: float
    beam4_decoder: float


@dataclass(frozen=True)
class Table3Row:
    """Billion-Word LM quality: perplexity a word."""

    row: str
    h: int
    k: int
    f: int
    ppl_dev: float


TABLE_1 = (
    Table1Row("multi-head", 8, 128, 4096, 1.424, 26.7, 27.7, 28.4),
    Table1Row("multi-query", 8, 128, 5440, 1.439, 26.5, 27.5, 28.5),
    Table1Row("multi-head-local", 8, 128, 4096, 1.427, 26.6, 27.5, 28.3),
    Table1Row("multi-query-local", 8, 128, 5440, 1.437, 26.5, 27.6, 28.2),
    Table1Row("multi-head-1x128", 1, 128, 6784, 1.518, 25.8),
    Table1Row("multi-head-2x64", 2, 64, 6784, 1.480, 26.2, 26.8, 27.9),
    Table1Row("multi-head-4x32", 4, 32, 6784, 1.488, 26.1),
    Table1Row("multi-head-8x16", 8, 16, 6784, 1.513, 25.8),
)

TABLE_2 = (
    Table2Row("multi-head", 13.2, 1.7, 46, 2.0, 203),
    Table2Row("multi-query", 13.0, 1.5, 3.8, 1.6, 32),
    Table2Row("multi-head-local", 13.2, 1.7, 23, 1.9, 47),
    Table2Row("multi-query-local", 13.0, 1.5, 3.3, 1.6, 16),
)

TABLE_3 = (
    Table3Row("multi-head", 8, 128, 8192, 29.9),
    Table3Row("multi-query", 8, 128, 9088, 30.2),
    Table3Row("multi-head-1x128", 1, 128, 9984, 31.2),
    Table3Row("multi-head-2x64", 2, 64, 9984, 31.1),
    Table3Row("multi-head-4x32", 4, 32, 9984, 31.0),
    Table3Row("multi-head-8x16", 8, 16, 9984, 30.9),
)


@dataclass(frozen=True)
class Training:
    """§4.1: what the runs of a quality table had in common. `tokens` are a step's, of the target.

    "211 million parameters", "100,000 steps (~20 epochs)", "128 examples", each of a 256-token
    input and a 256-token target; "192 million", "136K steps (10 epochs)", "64K tokens".
    """

    data: str
    parameters: int
    steps: int
    epochs: int
    tokens: int
    chip: str
    dev: str
    test: str | None = None


@dataclass(frozen=True)
class Timing:
    """§4.3: what the times of Table 2 were taken of."""

    parameters: int
    batch: int
    source: int
    target: int
    chip: str


TABLE_1_TRAINING = Training(
    data="WMT 2014 English-German",
    parameters=211_000_000,
    steps=100_000,
    epochs=20,
    tokens=128 * 256,
    chip="a 32-core TPUv3 cluster",
    dev="sacrebleu -t wmt13",
    test="sacrebleu -t wmt14",
)
TABLE_2_TIMING = Timing(
    parameters=211_000_000, batch=1024, source=128, target=128, chip="one TPUv2 (8 cores)"
)
TABLE_3_TRAINING = Training(
    data="the Billion-Word Benchmark",
    parameters=192_000_000,
    steps=136_000,
    epochs=10,
    tokens=64 * 1024,
    chip="a 32-core TPUv3 cluster",
    dev="its dev set",
)
