"""The examples of docs/speed.md run as printed."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

DOC = Path(__file__).parents[2] / "docs" / "speed.md"


@pytest.mark.example
def test_the_examples_run_as_printed():
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", DOC.read_text(), re.M | re.S)
    for indent, example in blocks:
        lines = [line.removeprefix(indent) for line in example.splitlines()]
        exec(compile("\n".join(lines), str(DOC), "exec"), namespace)
    net, params = namespace["Net"](), namespace["params"]
    assert {"Conv_0", "Conv_1", "Dense_0"} == set(params)
    logits = net.apply({"params": params}, jnp.ones((3, 28, 28, 1)))
    assert logits.shape == (3, 10)
    stored = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((1, 28, 28, 1), jnp.uint8))
    assert jax.tree.structure(stored["params"]) == jax.tree.structure(params)
