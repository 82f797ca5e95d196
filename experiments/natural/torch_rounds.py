"""FedAvg with an LSTM of characters in plain PyTorch, on mini-batches from a file.

Imports NumPy and PyTorch alone, for an environment without JAX:

    python torch_rounds.py BATCHES.npz RESULT.npz
"""

import sys

import numpy as np
import torch
from torch.nn import functional as F

FROM_TORCH = {  # parameters of the LSTM: ours are transposed
    "weight_ih_l0": "input_kernel",
    "weight_hh_l0": "hidden_kernel",
    "bias_ih_l0": "input_bias",
    "bias_hh_l0": "hidden_bias",
}


class CharacterModel(torch.nn.Module):
    """Vectors of the characters, one LSTM layer, and logits of the next character."""

    def __init__(self, start):
        super().__init__()
        self.vectors = torch.nn.Parameter(torch.tensor(start["embedding"]))
        hidden, width = start["layers_0/hidden_kernel"].shape[0], start["embedding"].shape[1]
        self.lstm = torch.nn.LSTM(width, hidden, batch_first=True)
        with torch.no_grad():
            for name, ours in FROM_TORCH.items():
                getattr(self.lstm, name).copy_(torch.tensor(start[f"layers_0/{ours}"].T))
        self.decoder = torch.nn.Parameter(torch.tensor(start["decoder"]))
        self.bias = torch.nn.Parameter(torch.tensor(start["decoder_bias"]))

    def forward(self, x):
        """Compute the logits [B, L, V] of characters [B, L]."""
        return self.lstm(self.vectors[x])[0] @ self.decoder + self.bias

    def loss(self, x, y):
        """Average the cross-entropy over a row's characters, then over the rows."""
        scored = y >= 0
        losses = F.cross_entropy(self(x).movedim(-1, 1), y.clamp(min=0), reduction="none")
        return ((losses * scored).sum(1) / scored.sum(1)).mean()


def run(file):
    """Run all rounds; returns the last parameters and each round's mean loss over its rows.

    Args:
      file: arrays ``start/NAME``, ``client_lr``, ``rounds``, and for each round t
        ``t/weights`` [S], ``t/steps`` [S], and of client i in step k ``t/i/k/x`` and ``t/i/k/y``.
    """
    start = {n.removeprefix("start/"): file[n] for n in file.files if n.startswith("start/")}
    model = CharacterModel(start)
    names = [name for name, _ in model.named_parameters()]
    server = [leaf.detach().clone() for leaf in model.parameters()]
    losses = []
    for t in range(int(file["rounds"])):
        weights, steps = file[f"{t}/weights"], file[f"{t}/steps"]
        mean = [torch.zeros_like(leaf) for leaf in server]
        total_loss, num_rows = 0.0, 0
        for i, share in enumerate(weights / weights.sum()):
            with torch.no_grad():
                for leaf, value in zip(model.parameters(), server, strict=True):
                    leaf.copy_(value)
            optimizer = torch.optim.SGD(model.parameters(), lr=float(file["client_lr"]))
            for k in range(steps[i]):
                x, y = (torch.tensor(file[f"{t}/{i}/{k}/{n}"].astype(np.int64)) for n in "xy")
                optimizer.zero_grad()
                loss = model.loss(x, y)
                loss.backward()
                optimizer.step()
                total_loss += float(loss.detach()) * len(x)
                num_rows += len(x)
            for total, leaf in zip(mean, model.parameters(), strict=True):
                total += float(share) * leaf.detach()
        server = mean
        losses.append(total_loss / num_rows)
    back = {ours: f"layers_0/{name}" for ours, name in FROM_TORCH.items()}
    renamed = {"vectors": "embedding", "bias": "decoder_bias"}
    found = {}
    for name, leaf in zip(names, server, strict=True):
        plain = name.removeprefix("lstm.")
        found[back.get(plain, renamed.get(plain, plain))] = (
            leaf.numpy().T if plain in back else leaf.numpy()
        )
    return {**found, "losses": np.array(losses)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    np.savez(sys.argv[2], **run(np.load(sys.argv[1])))
