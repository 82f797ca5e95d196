"""The barrier of a run's processes, which JAX has in a private module only."""

import socket
import subprocess
import sys

import jax
import pytest

from fedjax_lab.simulation import processes

ALONE = """
import jax
from fedjax_lab.simulation.processes import _SeveralProcesses

jax.distributed.initialize("127.0.0.1:{port}", num_processes=1, process_id=0)
for _ in range(2):
    _SeveralProcesses().meet()
print("met twice")
"""


def test_jax_has_the_barrier_where_it_is_looked_for():
    """It fails where a release of JAX moves it; one process is through at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = [sys.executable, "-c", ALONE.format(port=port)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "met twice\n", done.stderr


def test_where_jax_has_moved_it_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    monkeypatch.delattr("jax._src.distributed", raising=False)
    with pytest.raises(ImportError, match=rf"jax {jax.__version__} has moved its coordination"):
        processes._wait_at_barrier("anywhere")
