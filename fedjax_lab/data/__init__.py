"""Data: from files on disk to the mini-batches of a round.

``load`` reads a data set. ``partition`` divides it among clients and puts it on the device;
``from_clients`` does so for data that come with their clients. ``draw_batch`` samples a round's
clients and mini-batches.
"""

from fedjax_lab.data import synthetic
from fedjax_lab.data.augment import normalization, preprocess
from fedjax_lab.data.chats import TEMPLATES, Template, from_chats, load_tokenizer, pack_chats
from fedjax_lab.data.clients import divide_like, from_clients, split_clients, split_examples
from fedjax_lab.data.clock import ClientTimes, Devices, diurnal_availability
from fedjax_lab.data.cohort import draw_batch
from fedjax_lab.data.federated import FederatedArrays, partition
from fedjax_lab.data.natural import from_table, from_tfds, load_fedjax, load_leaf
from fedjax_lab.data.packing import Sentence, Tokens, pack, scored_per_row
from fedjax_lab.data.partition import PARTITIONS
from fedjax_lab.data.shakespeare import load_federated
from fedjax_lab.data.sources import DATASETS, Examples, load, num_classes
from fedjax_lab.data.stream_files import open_stream, write_stream
from fedjax_lab.data.streams import FederatedStream, stream
from fedjax_lab.data.uniform import sample_clients

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "TEMPLATES",
    "ClientTimes",
    "Devices",
    "Examples",
    "FederatedArrays",
    "FederatedStream",
    "Sentence",
    "Template",
    "Tokens",
    "diurnal_availability",
    "divide_like",
    "draw_batch",
    "from_chats",
    "from_clients",
    "from_table",
    "from_tfds",
    "load",
    "load_federated",
    "load_fedjax",
    "load_leaf",
    "load_tokenizer",
    "normalization",
    "num_classes",
    "open_stream",
    "pack",
    "pack_chats",
    "partition",
    "preprocess",
    "sample_clients",
    "scored_per_row",
    "split_clients",
    "split_examples",
    "stream",
    "synthetic",
    "write_stream",
]
