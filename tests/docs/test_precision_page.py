"""The example of docs/precision.md runs as printed, and both dtypes learn."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


@pytest.mark.example
def test_the_example_runs(capsys):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(compile(source, str(PAGE), "exec"), namespace)
    accuracy = namespace["accuracy"]
    assert list(accuracy) == ["float32", "bfloat16"]
    assert accuracy["float32"] > 0.85
    assert abs(accuracy["bfloat16"] - accuracy["float32"]) < 0.03
    assert capsys.readouterr().out.strip() == str(accuracy)
