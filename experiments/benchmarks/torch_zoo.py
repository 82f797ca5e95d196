"""The networks of ``zoo`` in PyTorch, and FedAvg as a plain loop written well.

Each function builds the twin of the network of its name, from the sizes in the job. Parameters are
overwritten in place, gradients never accumulate, and images are in the layout for which PyTorch's
convolutions are fastest.
"""

import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks import torch_models
from experiments.benchmarks.opponents.torch_loop import run_fedavg
from experiments.benchmarks.torch_models import DEVICE, Clients

EPSILON = 1e-6  # flax's, of norms


class ChannelsFirst(nn.Module):
    """[B, ..., C] seen as [B, C, ...], without a copy."""

    def forward(self, x):
        """Move the axis."""
        return x.movedim(-1, 1)


def linen_cnn(job):
    """LeNet."""
    width = job["width"]
    return nn.Sequential(
        ChannelsFirst(),
        *(nn.LazyConv2d(width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.LazyLinear(120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, job["num_classes"]),
    )


def nnx_cnn(job):
    """Two convolutions with average pooling."""
    width = job["width"]
    return nn.Sequential(
        ChannelsFirst(),
        *(nn.LazyConv2d(width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, job["num_classes"])),
    )


def equinox_cnn(job):
    """Two convolutions without padding."""
    width = job["width"]
    return nn.Sequential(
        ChannelsFirst(),
        *(nn.LazyConv2d(width, 4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, job["num_classes"])),
    )


def haiku_cnn(job):
    """Two convolutions with max-pooling."""
    width = job["width"]
    return nn.Sequential(
        ChannelsFirst(),
        *(nn.LazyConv2d(width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, job["num_classes"])),
    )


class TextCNN(nn.Module):
    """Convolutions of 3, 4 and 5 words, each with its maximum over time.

    Words are pixels of one row, because ``Conv1d`` has no layout with channels last, and copies.
    """

    def __init__(self, job):
        super().__init__()
        width = job["width"]
        self.embedding = nn.Embedding(job["vocabulary"], 128)
        self.convolutions = nn.ModuleList(nn.Conv2d(128, width, (1, size)) for size in (3, 4, 5))
        self.dense = nn.Linear(3 * width, job["num_classes"])

    def forward(self, words):
        """Logits [B, C] of words [B, L]."""
        x = self.embedding(words).transpose(1, 2).unsqueeze(2)
        found = [
            F.relu(convolution(x)).flatten(2).max(2).values for convolution in self.convolutions
        ]
        return self.dense(torch.cat(found, 1))


def volume_cnn(job):
    """Two convolutions and max-poolings in three dimensions."""
    width = job["width"]
    return nn.Sequential(
        ChannelsFirst(),
        *(nn.LazyConv3d(width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, job["num_classes"])),
    )


def _normalised(job, channels, features, kernel, stride=1, groups=1):
    """Return a convolution without bias and its GroupNorm."""
    options = {"stride": stride, "padding": kernel // 2, "groups": groups, "bias": False}
    convolution = nn.Conv2d(channels, features, kernel, **options)
    return convolution, nn.GroupNorm(job["num_groups"], features, EPSILON)


class Residual(nn.Module):
    """A sum of two branches, and what is applied to it."""

    def __init__(self, residual, shortcut, after):
        super().__init__()
        self.residual, self.shortcut, self.after = residual, shortcut, after

    def forward(self, x):
        """Run the block."""
        return self.after(self.shortcut(x) + self.residual(x))


def resnet(job):
    """ResNet of two convolutions a block."""
    width = channels = job["width"]
    layers = [ChannelsFirst(), *_normalised(job, job["shape"][-1], width, 3), nn.ReLU()]
    for factor, stride in job["blocks"]:
        features = factor * width
        first = _normalised(job, channels, features, 3, stride)
        residual = nn.Sequential(*first, nn.ReLU(), *_normalised(job, features, features, 3))
        shortcut = nn.Identity()
        if channels != features:
            shortcut = nn.Sequential(*_normalised(job, channels, features, 1, stride))
        layers.append(Residual(residual, shortcut, nn.ReLU()))
        channels = features
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *pooled, nn.Linear(channels, job["num_classes"]))


def vgg11(job):
    """VGG-11 with one dense layer."""
    channels, layers = job["shape"][-1], [ChannelsFirst()]
    for factor, stride in job["blocks"]:
        features = factor * job["width"]
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (stride > 1)
        channels = features
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(job["num_classes"]))


def mobilenet(job):
    """Inverted residuals with depthwise convolutions."""
    width = channels = job["width"]
    layers = [ChannelsFirst(), *_normalised(job, job["shape"][-1], width, 3), nn.ReLU6()]
    for factor, stride in job["blocks"]:
        features, hidden = factor * width, 4 * channels
        block = nn.Sequential(
            *(*_normalised(job, channels, hidden, 1), nn.ReLU6()),
            *(*_normalised(job, hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()),
            *_normalised(job, hidden, features, 1),
        )
        is_same = stride == 1 and channels == features
        layers.append(Residual(block, nn.Identity(), nn.Identity()) if is_same else block)
        channels = features
    layers += [*_normalised(job, channels, 8 * width, 1), nn.ReLU6()]
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *pooled, nn.Linear(8 * width, job["num_classes"]))


class UNet(nn.Module):
    """Two steps down by strides, two up by transposed convolutions, with skip connections."""

    def __init__(self, job):
        super().__init__()
        width = job["width"]
        self.first = nn.Conv2d(job["shape"][-1], width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(features // 2, features, 3, 2, 1), nn.ReLU()),
                *(nn.Conv2d(features, features, 3, 1, 1), nn.ReLU()),
            )
            for features in (2 * width, 4 * width)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * features, features, 2, 2) for features in (2 * width, width)
        )
        self.joined = nn.ModuleList(
            nn.Conv2d(2 * features, features, 3, 1, 1) for features in (2 * width, width)
        )
        self.last = nn.Conv2d(width, job["num_classes"], 1)

    def forward(self, x):
        """Logits [B, H, W, C] of images [B, H, W, C]."""
        x, skipped = F.relu(self.first(x.movedim(-1, 1))), []
        for down in self.down:
            skipped.append(x)
            x = down(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = F.relu(joined(torch.cat([up(x), skipped.pop()], 1)))
        return self.last(x).movedim(1, -1)


class RecurrentLanguageModel(nn.Module):
    """Word vectors, a recurrent layer, decoder; the layer has no more biases than flax's.

    PyTorch adds two biases where one is enough. Those that flax lacks stay zero.
    """

    def __init__(self, job, kind):
        super().__init__()
        width = job["width"]
        self.embedding = nn.Embedding(job["vocabulary"], width)
        layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](width, width)
        self.kind, self.width = kind, width
        self.of_input, self.of_state = layer.weight_ih_l0, layer.weight_hh_l0
        self.bias = layer.bias_ih_l0
        # Of the GRU's candidate, the reset gate multiplies the state's bias, so that both count.
        self.bias_of_state = nn.Parameter(torch.zeros(width if kind == "gru" else 0))
        self.decoder = nn.Linear(width, job["num_classes"])

    def forward(self, words):
        """Logits of each next word."""
        x = self.embedding(words)
        rest = len(self.bias) - len(self.bias_of_state)
        weights = [self.of_input, self.of_state, self.bias, F.pad(self.bias_of_state, (rest, 0))]
        start = x.new_zeros(1, len(x), self.width)
        options = True, 1, 0.0, self.training, False, True  # biases, one layer, batch first
        if self.kind == "lstm":
            return self.decoder(torch.lstm(x, (start, start), weights, *options)[0])
        return self.decoder(torch.gru(x, start, weights, *options)[0])


class EncoderBlock(nn.Module):
    """Self-attention and two dense layers, each after LayerNorm."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.dense = nn.Sequential(
            *(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
        )

    def forward(self, x):
        """Run the block."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dense(self.norm2(x))


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, blocks, the mean of the tokens."""

    def __init__(self, job):
        super().__init__()
        height, columns, channels = job["shape"]
        width = job["width"]
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.positions = nn.Parameter(torch.zeros(1, (height // 4) * (columns // 4), width))
        self.blocks = nn.Sequential(*(EncoderBlock(width) for _ in job["blocks"]))
        self.norm = nn.LayerNorm(width, EPSILON)
        self.dense = nn.Linear(width, job["num_classes"])

    def forward(self, x):
        """Logits [B, C] of images [B, H, W, C]."""
        x = self.patches(x.movedim(-1, 1)).flatten(2).transpose(1, 2) + self.positions
        return self.dense(self.norm(self.blocks(x)).mean(1))


TWINS = {
    "linen_cnn": linen_cnn,
    "nnx_cnn": nnx_cnn,
    "equinox_cnn": equinox_cnn,
    "haiku_cnn": haiku_cnn,
    "text_cnn": TextCNN,
    "volume_cnn": volume_cnn,
    "resnet18": resnet,
    "resnet20": resnet,
    "vgg11": vgg11,
    "mobilenet": mobilenet,
    "unet": UNet,
    "lstm": lambda job: RecurrentLanguageModel(job, "lstm"),
    "gru": lambda job: RecurrentLanguageModel(job, "gru"),
    "lstm_characters": lambda job: RecurrentLanguageModel(job, "lstm"),
    "gru_characters": lambda job: RecurrentLanguageModel(job, "gru"),
    "vit": ViT,
}


def build_model(job, example):
    """Return the twin of the job's network, on the device.

    Raises:
      AssertionError: it has another number of parameters.
    """
    model = TWINS[job["network"]](job).to(DEVICE)
    with torch.no_grad():
        model(example)  # lazy layers learn their sizes
    number = sum(p.numel() for p in model.parameters())
    if number != job["num_params"]:
        raise AssertionError(f"PyTorch's has {number} parameters, JAX's {job['num_params']}")
    is_volume = len(job["shape"]) == 4
    return model.to(memory_format=torch.channels_last_3d if is_volume else torch.channels_last)


def run(system, job):
    """Rounds of FedAvg."""
    torch_models.set_up(job)
    clients = Clients(job["data"])
    model = build_model(job, clients.x[:1])
    sizes = {name: job[name] for name in ("cohort_size", "local_steps", "batch_size", "client_lr")}
    return run_fedavg(model, clients, job, **sizes, compiled=False)
