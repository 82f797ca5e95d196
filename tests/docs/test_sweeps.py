"""The example of docs/sweeps.md runs as printed, and the page says what it does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedjax_lab

DOC = Path(__file__).parents[2] / "docs" / "sweeps.md"


@pytest.mark.example
def test_the_example_runs_as_printed(capsys):
    text = DOC.read_text(encoding="utf-8")
    example, schedule = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(compile(example, str(DOC), "exec"), namespace)
    result = namespace["result"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4 + 1  # head, rule, four points, the best
    assert result.history["accuracy"].shape == (4, 3, 2)
    assert result.rounds.tolist() == [10, 20]
    means = result.history["accuracy"][..., -1].mean(1)
    assert np.argmax(means) == result.points.index(result.best("accuracy"))
    assert means.max() > 0.5  # ten classes: it learns
    exec(compile(schedule, str(DOC), "exec"), namespace)
    options = {"rounds": 1, "cohort_size": 2, "local_steps": 1, "batch_size": 4, "seeds": (0,)}
    params = {"w": np.zeros((64, 10), np.float32)}
    namespace["loss_fn"] = lambda params, examples, key: (
        examples.x.reshape(-1, 64) / 16.0 @ params["w"]
    ).sum(1)
    swept = fedjax_lab.sweep(
        namespace["build"], params, namespace["clients"], points={"peak": [0.2, 0.1]}, **options
    )
    moved = swept.params["w"][:, 0]
    np.testing.assert_allclose(moved[0], 2 * moved[1], rtol=1e-5)  # a linear loss
