"""§4.1-4.3: the paper's published figures, Tables 1, 2 and 3, and how they were obtained."""

from dataclasses import dataclass

from writehead.cost import Setting


@dataclass(frozen=True)
class QualityRow:
    """A row of Table 1 or 3; `loss` is ln(PPL) per subword or perplexity per word, on dev."""

    row: str
    h: int
    k: int
    f: int
    loss: float
    bleu_dev: float | None = None
    bleu_test_greedy: float | None = None
    bleu_test_beam4: float | None = None


@dataclass(frozen=True)
class Table2Row:
    """TPUv2 microseconds per token: training, and encoder + decoder in greedy and beam-4 search."""

    row: str
    training: float
    encoder: float
    decoder: float
    beam4_encoder: float
    beam4_decoder: float


TABLE_1 = (
    QualityRow("multi-head", 8, 128, 4096, 1.424, 26.7, 27.7, 28.4),
    QualityRow("multi-query", 8, 128, 5440, 1.439, 26.5, 27.5, 28.5),
    QualityRow("multi-head-local", 8, 128, 4096, 1.427, 26.6, 27.5, 28.3),
    QualityRow("multi-query-local", 8, 128, 5440, 1.437, 26.5, 27.6, 28.2),
    QualityRow("multi-head-1x128", 1, 128, 6784, 1.518, 25.8),
    QualityRow("multi-head-2x64", 2, 64, 6784, 1.480, 26.2, 26.8, 27.9),
    QualityRow("multi-head-4x32", 4, 32, 6784, 1.488, 26.1),
    QualityRow("multi-head-8x16", 8, 16, 6784, 1.513, 25.8),
)

TABLE_2 = (
    Table2Row("multi-head", 13.2, 1.7, 46, 2.0, 203),
    Table2Row("multi-query", 13.0, 1.5, 3.8, 1.6, 32),
    Table2Row("multi-head-local", 13.2, 1.7, 23, 1.9, 47),
    Table2Row("multi-query-local", 13.0, 1.5, 3.3, 1.6, 16),
)

TABLE_3 = (
    QualityRow("multi-head", 8, 128, 8192, 29.9),
    QualityRow("multi-query", 8, 128, 9088, 30.2),
    QualityRow("multi-head-1x128", 1, 128, 9984, 31.2),
    QualityRow("multi-head-2x64", 2, 64, 9984, 31.1),
    QualityRow("multi-head-4x32", 4, 32, 9984, 31.0),
    QualityRow("multi-head-8x16", 8, 16, 9984, 30.9),
)


@dataclass(frozen=True)
class Training:
    """§4.1: how the models of a quality table were trained; `tokens` are target tokens per step."""

    data: str
    parameters: int
    steps: int
    tokens: int


TABLE_1_TRAINING = Training("WMT14 English-German", 211_000_000, 100_000, 128 * 256)
TABLE_2_SETTING, TABLE_2_CHIP = Setting(batch=1024, source=128, target=128), "one TPUv2 (8 cores)"
TABLE_3_TRAINING = Training("Billion-Word Benchmark", 192_000_000, 136_000, 64 * 1024)
