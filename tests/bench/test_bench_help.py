import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from writehead.cli import app

VERBS = sorted(get_command(app).commands["bench"].commands)


def test_there_is_a_benchmark_for_each_kind_of_work():
    assert VERBS == ["attention", "decode", "plot", "tokens", "train", "translate"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_benchmark_answers_help_with_an_example(verb):
    result = CliRunner().invoke(app, ["bench", verb, "--help"])
    assert result.exit_code == 0
    assert f"Example: writehead bench {verb}" in " ".join(result.output.split())


def test_help_comes_without_pytorch():
    code = (
        "import sys; sys.argv = ['writehead', 'bench', 'decode', '--help']\n"
        "from writehead.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
