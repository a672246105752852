import pytest
import torch

from writehead import cost
from writehead.errors import ConfigError
from writehead.explain import quantity
from writehead.paper.presets import FAMILIES, preset, preset_names, rows
from writehead.paper.tables import TABLE_1, TABLE_2, TABLE_3


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row.row)
def test_every_row_of_table_1_has_the_papers_sizes_and_211m_parameters(row):
    config = preset(f"wmt14/{row.row}")
    assert (config.h, config.k, config.v, config.f) == (row.h, row.k, row.k, row.f)
    assert config.window == (32 if "local" in row.row else None)
    assert config.kind == ("multi-query" if "query" in row.row else "multi-head")
    assert quantity(sum(cost.parameters(config).values())) == "211M"


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: row.row)
def test_every_row_of_table_3_has_the_papers_sizes_and_192m_parameters(row):
    config = preset(f"lm1b/{row.row}")
    assert (config.h, config.k, config.v, config.f) == (row.h, row.k, row.k, row.f)
    assert config.kind == ("multi-query" if "query" in row.row else "multi-head")
    assert quantity(sum(cost.parameters(config).values())) == "192M"


def test_the_tables_list_the_rows_in_the_order_of_the_presets():
    assert [row.row for row in TABLE_1] == list(rows("wmt14"))
    assert [row.row for row in TABLE_3] == list(rows("lm1b"))
    assert [row.row for row in TABLE_2] == list(rows("wmt14"))[:4]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_of_a_family_have_one_total_and_small_heads_hold_as_much_as_one_write_head(family):
    configs = rows(family)
    assert len({sum(cost.parameters(config).values()) for config in configs.values()}) == 1
    one = configs["multi-query"].decoder_attention.kv_size
    for name, config in configs.items():
        if "x" in name.removeprefix("multi-head"):
            assert config.decoder_attention.kv_size == one


def test_small_families_keep_the_shape_that_was_asked_for():
    for name in ("wmt14-small/multi-query", "lm1b-small/multi-query"):
        config = preset(name)
        assert (config.d, config.h, config.g, config.k, config.v) == (512, 8, 1, 64, 64)


def test_preset_names_are_all_found_and_an_unknown_one_is_answered_with_the_nearest():
    assert len(preset_names()) == len(set(preset_names())) == 4 * 8 + 3 * 6
    for name in preset_names():
        assert preset(name)
    with pytest.raises(ConfigError, match="did you mean 'wmt14/multi-query'"):
        preset("wmt14/multiquery")
    with pytest.raises(ConfigError, match="did you mean 'wmt14-small/multi-head-1x64'"):
        preset("wmt14-small/multi-head-1x6")


@pytest.mark.parametrize("name", [3, None, b"tiny/multi-query", ["tiny/multi-query"]])
def test_a_preset_is_asked_for_by_a_string(name):
    with pytest.raises(ConfigError) as caught:
        preset(name)
    assert str(caught.value) == (
        f"a preset is named by text, such as 'wmt14/multi-query', not by {name!r}; preset_names() "
        f"has all of them"
    )
    with pytest.raises(ConfigError, match=r"not by tensor\(\["):
        preset(torch.zeros(1000))
