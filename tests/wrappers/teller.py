"""A method whose clients send what their examples hold, and whose server keeps what arrives.

Params are a vector [3] and a matrix [2, 2]; a message has two fields of that shape, of which one is
averaged and the other summed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import Algorithm, CohortBatch, Phase, build_round, tree

N, D = 9, 7  # clients; numbers of a field


def to_tree(row):
    return {"v": row[..., :3], "w": row[..., 3:].reshape(*row.shape[:-1], 2, 2)}


def to_vector(field):
    return np.concatenate([np.asarray(field["v"]), np.asarray(field["w"]).reshape(-1)])


def teller(reduce=None, stateful=False):
    """The method; ``reduce`` of the fields "first" and "second"."""
    reduce = {"first": "mean", "second": "sum"} if reduce is None else reduce

    def start(params, num_clients, batch):
        row = jnp.zeros(num_clients) if stateful else ()
        zeros = {
            "mean": tree.zeros_like(params),
            "sum": tree.zeros_like(params),
            "stack": jax.tree.map(lambda x: jnp.zeros((num_clients, *x.shape)), params),
        }
        return {"params": params, "got": {name: zeros[how] for name, how in reduce.items()}}, row

    def client_update(received, row, batch):
        said = batch.examples[0, 0]  # [2, D]
        message = {name: to_tree(said[i]) for i, name in enumerate(reduce)}
        return message, row + 1 if stateful else row, {"loss": (said.sum(), jnp.ones(()))}

    def server_update(server, messages, cohort):
        got = {name: messages[name] for name in reduce}
        norm = jnp.zeros(()) if "stack" in reduce.values() else tree.norm(got["first"])
        return {**server, "got": got}, {"delta_norm": norm}

    phase = Phase(lambda server, t: (), client_update, server_update, reduce)
    return Algorithm("teller", start, (phase,), lambda state: state.server["params"])


def params(dtype=jnp.float32):
    return to_tree(jnp.zeros(D, dtype))


def batch_of(messages, *, weights=None, participates=None, ids=None, seed=0, round=0):
    """A round in which slot s sends ``messages[s]`` [2, D]."""
    messages = np.asarray(messages)
    ids = np.arange(len(messages)) if ids is None else ids
    return CohortBatch(
        client_ids=jnp.asarray(ids, jnp.int32),
        examples=jnp.asarray(messages)[:, None, None],
        key=jax.random.key(seed),
        round=jnp.asarray(round, jnp.int32),
        weights=None if weights is None else jnp.asarray(weights),
        participates=None if participates is None else jnp.asarray(participates),
    )


def run(algorithm, batch, client_map="vmap"):
    """(what the server got of each field [fields, 2 D], metrics) of a round."""
    state = algorithm.init(params(batch.examples.dtype), N)
    state, metrics = jax.jit(build_round(algorithm, client_map))(state, batch)
    return np.stack([to_vector(field) for field in state.server["got"].values()]), metrics
