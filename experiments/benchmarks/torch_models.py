"""The workloads' models and data in PyTorch, for all systems that are made of it."""

import os
import platform

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks.child import CHECKED, PEAK_SIZE, max_resident_bytes, peak_flops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def set_up(job, threads=None):
    """All cores of a CPU, or ``threads``; on a GPU the job's precision, and tuned kernels.

    The precision of products is "tf32" (the default, as it is jax's), "float32" or "bfloat16".
    """
    torch.set_num_threads(threads or job.get("threads") or os.cpu_count() or 1)
    precision = job.get("precision", "tf32")
    if DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "float32"
        torch.backends.cudnn.benchmark = True
    if precision == "bfloat16":
        torch.set_autocast_dtype(DEVICE.type, torch.bfloat16)
        torch.set_autocast_enabled(DEVICE.type, True)
        torch.set_autocast_cache_enabled(False)  # it would keep the first step's parameters


class ChannelsFirst(nn.Module):
    """[B, H, W, C] seen as [B, C, H, W]: no copy, and PyTorch's fast layout on every device."""

    def forward(self, x):
        """Permute."""
        return x.permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """Two conv3x3 with GroupNorm beside an identity or a projection."""

    def __init__(self, channels, features, stride):
        super().__init__()
        self.residual = nn.Sequential(
            *(nn.Conv2d(channels, features, 3, stride, 1, bias=False), nn.GroupNorm(2, features)),
            nn.ReLU(),
            *(nn.Conv2d(features, features, 3, 1, 1, bias=False), nn.GroupNorm(2, features)),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels != features:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, features, 1, stride, bias=False), nn.GroupNorm(2, features)
            )

    def forward(self, x):
        """Run the block."""
        return F.relu(self.residual(x) + self.shortcut(x))


def _resnet18(channels, width, num_classes):
    layers = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.GroupNorm(2, width), nn.ReLU()]
    channels = width
    for factor in (1, 2, 4, 8):
        features = factor * width
        layers.append(ResidualBlock(channels, features, min(factor, 2)))
        layers.append(ResidualBlock(features, features, 1))
        channels = features
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]


class LanguageModel(nn.Module):
    """Word vectors, LSTM layers, decoder: words [B, L] -> logits [B, L, V]."""

    def __init__(self, num_words, units, layers):
        super().__init__()
        self.embedding = nn.Embedding(num_words, units)
        self.layers = nn.LSTM(units, units, layers, batch_first=True)
        self.decoder = nn.Linear(units, num_words)

    def forward(self, x):
        """Logits of each next word."""
        return self.decoder(self.layers(self.embedding(x))[0])


def build_model(workload):
    """The module of a workload, on the device."""
    if workload.is_text:
        _, units, layers = workload.layers[0]
        return LanguageModel(workload.num_classes, units, layers).to(DEVICE)
    layers, shape = [], workload.input_shape
    if workload.layers[0][0] != "dense":
        layers.append(ChannelsFirst())
    for kind, *sizes in workload.layers:
        if kind == "conv":
            features, kernel = sizes
            layers.append(nn.Conv2d(shape[2], features, kernel))
            shape = (shape[0] - kernel + 1, shape[1] - kernel + 1, features)
        elif kind == "pool":
            layers.append(nn.MaxPool2d(2))
            shape = (shape[0] // 2, shape[1] // 2, shape[2])
        elif kind == "relu":
            layers.append(nn.ReLU())
        elif kind == "dropout":
            layers.append(nn.Dropout(sizes[0]))
        elif kind == "dense":
            if len(shape) > 1:
                layers.append(nn.Flatten())
            layers.append(nn.Linear(int(np.prod(shape)), sizes[0]))
            shape = (sizes[0],)
        elif kind == "resnet18":
            layers += _resnet18(shape[2], sizes[0], workload.num_classes)
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


def mean_loss(logits, y):
    """Mean cross-entropy over examples, of sequences over all their words."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class Clients:
    """All data in memory as a model takes it, and who holds what.

    Attributes:
      x, y: the examples of all clients.
      rows: the places of each client's examples in them.
    """

    def __init__(self, path):
        with np.load(path) as file:
            self.x, self.y = _resident(file["x"]), _resident(file["y"])
            self._test = _resident(file["x_test"][:CHECKED]), _resident(file["y_test"][:CHECKED])
            self._places = torch.from_numpy(file["indices"]).long().to(DEVICE)
            self._sizes = torch.from_numpy(file["sizes"]).long()
        self._first = self._sizes.cumsum(0) - self._sizes
        self.rows = self._places.split(self._sizes.tolist())

    def cohort(self, size):
        """Ids of different clients, [size]."""
        return torch.randperm(len(self.rows))[:size]

    def draw(self, cohort, steps, batch_size):
        """Places of all mini-batches of a cohort, drawn with replacement, [S, K, B]."""
        sizes, first = (
            of[cohort].to(DEVICE, non_blocking=True)[:, None] for of in (self._sizes, self._first)
        )
        number = steps * batch_size
        drawn = torch.rand(len(cohort), number, dtype=torch.float64, device=DEVICE) * sizes
        return self._places[first + drawn.long()].view(-1, steps, batch_size)

    @torch.no_grad()
    def test_loss(self, model):
        """Mean loss of the model on the first test examples."""
        model.eval()
        x, y = self._test
        loss = mean_loss(model(x), y)
        model.train()
        return float(loss)


def _resident(array):
    tensor = torch.from_numpy(array)
    if tensor.dtype == torch.uint8:
        return tensor.to(DEVICE).float() / 255
    return tensor.long().to(DEVICE)


def wait():
    """Until the device has nothing to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def about_device():
    """``peak_bytes``, ``device``, ``threads`` and ``versions`` of the answer."""
    on_gpu = DEVICE.type == "cuda"
    return {
        "compile_seconds": None,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else max_resident_bytes(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def peak():
    """The measured rate of a float32 matrix product, with the settings of the systems."""
    set_up({})
    a = torch.randn(PEAK_SIZE, PEAK_SIZE, device=DEVICE)
    out = torch.empty_like(a)

    def multiply():
        torch.mm(a, a, out=out)
        wait()

    return {"flops": peak_flops(multiply), "device": about_device()["device"]}
