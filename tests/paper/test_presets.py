import pytest
import torch

from writehead import cost
from writehead.errors import ConfigError
from writehead.explain import quantity
from writehead.paper.presets import FAMILIES, preset, preset_names, rows
from writehead.paper.tables import TABLE_1, TABLE_3


@pytest.mark.parametrize(
    ("family", "row", "total"),
    [("wmt14", row, "211M") for row in TABLE_1] + [("lm1b", row, "192M") for row in TABLE_3],
    ids=lambda value: getattr(value, "row", value),
)
def test_every_row_has_the_papers_sizes_and_parameters(family, row, total):
    config = preset(f"{family}/{row.row}")
    assert (config.h, config.k, config.v, config.f) == (row.h, row.k, row.k, row.f)
    assert config.window == (32 if "local" in row.row else None)
    assert config.kind == ("multi-query" if "query" in row.row else "multi-head")
    assert quantity(sum(cost.parameters(config).values())) == total


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_of_a_family_have_equal_totals_and_small_heads_the_size_of_a_write_head(family):
    configs = rows(family)
    assert len({sum(cost.parameters(config).values()) for config in configs.values()}) == 1
    one = configs["multi-query"].decoder_attention.kv_size
    for name, config in configs.items():
        if "x" in name.removeprefix("multi-head"):
            assert config.decoder_attention.kv_size == one
    if family.endswith("-small"):
        config = configs["multi-query"]
        assert (config.d, config.h, config.g, config.k, config.v) == (512, 8, 1, 64, 64)


def test_the_teacher_of_the_bundled_model_has_the_papers_size_and_a_cheaper_decoder():
    teacher, paper = preset("bundled-teacher/multi-query"), preset("wmt14/multi-query")
    sizes = [sum(cost.parameters(config).values()) for config in (teacher, paper)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.01
    assert teacher.decoder_layers < paper.decoder_layers
    assert teacher.f % 128 == 0  # matrix kernels are fastest with whole tiles


def test_there_are_rows_of_eight_families_and_other_names_are_errors():
    assert len({*preset_names()}) == 5 * 8 + 3 * 6
    for name in ("wmt14/multiquery", 3, None, ["tiny/multi-query"], torch.zeros(1000)):
        with pytest.raises(ConfigError, match="preset"):
            preset(name)
