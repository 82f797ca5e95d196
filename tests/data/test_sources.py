"""Data sets: real files against independent readers, and damaged files against clear errors."""

import gzip
import io
import struct
import sys
import zipfile
import zlib

import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.data import files, sources


def idx_bytes(array, *, kind=8, magic=b"\0\0"):
    head = magic + bytes([kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder, *, compress=False, **changes):
    """A valid IDX folder; ``changes`` replace the bytes of single files."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (12, 5, 4)),
        "train-labels-idx1-ubyte": np.arange(12) % 3,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (6, 5, 4)),
        "t10k-labels-idx1-ubyte": np.arange(6) % 3,
    }
    for name, array in arrays.items():
        content = changes.get(name.split("-idx")[0].replace("-", "_"), idx_bytes(array))
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


def write_npz(path, **changes):
    arrays = {
        "x_train": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "y_train": np.arange(6) % 3,
        "x_test": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
        "y_test": np.arange(3),
    }
    arrays.update(changes)
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})
    return arrays


def test_digits_are_scikit_learns():
    original = pytest.importorskip("sklearn.datasets").load_digits()
    train, test = data.load("digits")
    assert train.x.dtype == np.uint8
    assert train.y.dtype == np.int32
    assert train.x.shape[1:] == test.x.shape[1:] == (8, 8, 1)
    rows = np.concatenate([np.column_stack([s.x.reshape(-1, 64), s.y]) for s in (train, test)])
    expected = np.column_stack([original.data, original.target])
    np.testing.assert_array_equal(
        rows[np.lexsort(rows.T[::-1])], expected[np.lexsort(expected.T[::-1])]
    )
    assert data.num_classes(train) == 10
    share = np.bincount(test.y) / np.bincount(original.target)
    assert (np.abs(share - 0.2) < 0.01).all()


@pytest.mark.parametrize("compress", [False, True])
def test_idx_folder(tmp_path, compress):
    arrays = write_idx(tmp_path, compress=compress)
    train, test = data.load(f"idx:{tmp_path}")
    np.testing.assert_array_equal(train.x[..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(train.y, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(test.x[..., 0], arrays["t10k-images-idx3-ubyte"])
    assert train.x.shape == (12, 5, 4, 1)
    assert train.x.dtype == np.uint8
    assert test.y.dtype == np.int32
    by_name, _ = data.load("fashion_mnist", data_dir=tmp_path)
    np.testing.assert_array_equal(by_name.x, train.x)


images = np.zeros((12, 5, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(images, magic=b"\1\0"), "magic number 01000803"),
        (b"", "magic number"),
        (idx_bytes(images, kind=0x0D), r"data type 0x0d \(float32\)"),
        (idx_bytes(images, kind=0x07), r"data type 0x07 \(unknown\)"),
        (idx_bytes(images[0]), "2 dimensions; there must be 3"),
        (idx_bytes(images)[:9], "ends within its header"),
        (idx_bytes(images)[:-1], "ends after 239 of 240 values"),
        (idx_bytes(images) + b"\0", "extra bytes"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "ends after 0 of|would unpack to"),
        (idx_bytes(images[:0]), "no examples"),
        (idx_bytes(images[:5]), "n examples, and labels"),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_damaged_idx(tmp_path, compress, content, message):
    write_idx(tmp_path, compress=compress, train_images=content)
    with pytest.raises(ValueError, match=message) as error:
        data.load(f"idx:{tmp_path}")
    assert str(tmp_path) in str(error.value)


def test_damaged_gzip(tmp_path):
    write_idx(tmp_path, compress=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # the checksum
    broken = [whole[:cut] for cut in (1, 5, 11, len(whole) // 2, len(whole) - 1)]
    for content in [*broken, bytes(flipped), b"no gzip", whole + b"garbage"]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=path.name):
            data.load(f"idx:{tmp_path}")


def test_idx_labels_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        data.load(f"idx:{tmp_path}")
    write_idx(tmp_path, t10k_labels=idx_bytes(np.array([0, 1, 2, 3, 0, 0])))
    with pytest.raises(ValueError, match=r"test: labels between 0 and 3.*\[0, 3\)"):
        data.load(f"idx:{tmp_path}")


def test_npz(tmp_path):
    path = tmp_path / "set.npz"
    arrays = write_npz(path)
    train, test = data.load(f"npz:{path}")
    np.testing.assert_array_equal(train.x, arrays["x_train"][..., None])
    np.testing.assert_array_equal(test.y, arrays["y_test"])
    assert train.y.dtype == np.int32
    write_npz(path, x_train=np.ones((6, 7)), x_test=np.ones((3, 7)))
    train, _ = data.load(f"npz:{path}")
    assert train.x.dtype == np.float32
    assert train.x.shape == (6, 7)
    write_npz(path, x_train=np.ones((6, 7), np.int64), x_test=np.ones((3, 7), bool))
    train, test = data.load(f"npz:{path}")
    assert train.x.dtype == np.int32
    assert test.x.dtype == bool
    write_npz(path, x_train=np.ones((6, 7), np.float64), x_test=np.ones((3, 7), np.float16))
    train, test = data.load(f"npz:{path}")
    assert train.x.dtype == np.float32
    assert test.x.dtype == np.float16


def test_npz_of_a_regression(tmp_path):
    path = tmp_path / "set.npz"
    arrays = write_npz(path, y_train=np.linspace(-2, 1, 12).reshape(6, 2), y_test=np.ones((3, 2)))
    train, test = data.load(f"npz:{path}")
    np.testing.assert_array_equal(train.y, arrays["y_train"].astype(np.float32))
    np.testing.assert_array_equal(test.y, arrays["y_test"])
    with pytest.raises(ValueError, match=r"train.y has shape \(6, 2\) and dtype float32"):
        data.num_classes(train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "no array y_test"),
        ({"x_train": np.array([{}] * 6)}, "plain arrays"),
        ({"y_train": np.arange(5)}, "n examples, and labels"),
        ({"y_train": np.arange(6.0)}, r"targets have shape \(\) and dtype float32, test .* int32"),
        ({"y_train": np.full(6, np.nan)}, "targets that are NaN"),
        ({"y_train": np.array(list("abcdef"))}, "labels of dtype <U1"),
        ({"y_train": np.zeros((6, 2), int)}, "n examples, and labels"),
        ({"y_train": np.array([0, 1, 2, -1, 0, 0])}, "between -1 and 2; they must be at least 0"),
        ({"y_train": np.array([0, 1, 2, 2**31, 0, 0])}, "labels between"),
        ({"y_test": np.array([0, 1, 3])}, r"\[0, 3\)"),
        ({"x_train": np.full((6, 2, 2), np.nan)}, "NaN or infinite"),
        ({"x_test": np.full((3, 2, 2), np.inf)}, "test: examples that are NaN"),
        ({"x_test": np.full((3, 2, 2), 1e300)}, "has the value 1e.300; it must fit into float32"),
        ({"x_train": np.full((6, 2, 2), 2**40)}, "must fit into int32"),
        ({"x_train": np.full((6, 2, 2), "a")}, "real numbers"),
        ({"x_train": np.ones((6, 2, 2), complex)}, "real numbers"),
        ({"x_train": np.ones((0, 2, 2)), "y_train": np.ones(0, int)}, "no examples"),
        ({"x_test": np.ones((3, 2, 3))}, "they must be equal"),
        (
            {"x_train": np.full((6, 2, 2), 200, np.uint8), "x_test": np.ones((3, 2, 2))},
            "training examples have dtype uint8, test examples float64; both must be integers or",
        ),
        (
            {"x_train": np.ones((6, 2, 2), np.float32), "x_test": np.ones((3, 2, 2), bool)},
            "training examples have dtype float32, test examples bool; both must be integers or",
        ),
        ({"x_train": np.float32(1)}, "shape"),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    path = tmp_path / "set.npz"
    write_npz(path, **changes)
    with pytest.raises(ValueError, match=message):
        data.load(f"npz:{path}")


def test_what_unpacks_to_more_than_is_allowed_is_refused_before(tmp_path, monkeypatch):
    path = tmp_path / "set.npz"
    zeros = np.zeros((2**17, 8), np.uint8)  # 1 MiB, in a thousandth of its size
    arrays = write_npz(path, x_train=zeros, y_train=np.zeros(2**17, np.int32))
    np.savez_compressed(path, **arrays)
    assert path.stat().st_size < 2**14
    monkeypatch.setenv("FEDJAX_LAB_UNPACKED_GIB", str(2**-10))
    unpacked = zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    with pytest.raises(ValueError, match=r"would unpack to 1,5\d\d,\d+ .* set FEDJAX_LAB"):
        data.load(f"npz:{path}")
    monkeypatch.setattr(zipfile.ZipFile, "open", unpacked)
    assert files.read_npz(path, "labels", ["y_train"])["y_train"].shape == (2**17,)
    monkeypatch.setenv("FEDJAX_LAB_UNPACKED_GIB", "1")
    np.testing.assert_array_equal(files.read_npz(path, "set")["x_train"], zeros)
    monkeypatch.setenv("FEDJAX_LAB_UNPACKED_GIB", str(2**-10))
    np.savez(path, **arrays)  # of a file that is not compressed its own size tells all
    assert len(files.read_npz(path, "set")) == 4
    monkeypatch.setenv("FEDJAX_LAB_UNPACKED_GIB", "much")
    with pytest.raises(ValueError, match="FEDJAX_LAB_UNPACKED_GIB is 'much'"):
        files.read_npz(path, "set")


def test_so_is_a_zipped_idx_file(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 10**6, 100, 100)))
    with pytest.raises(ValueError, match=r"to 10,000,000,000 \(9.3 GiB\); 8 GiB are allowed"):
        files.read_idx(path, ndim=3)


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_damaged_npz(tmp_path, packing):
    path = tmp_path / "set.npz"
    with pytest.raises(FileNotFoundError, match="no file"):
        data.load(f"npz:{path}")
    arrays = write_npz(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    whole = path.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (b"", b"text", (tmp_path / "one.npy").read_bytes(), whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.npz"):
            data.load(f"npz:{path}")
    # Any single damaged byte is either reported or harmless; nothing else may escape.
    rng = np.random.default_rng(0)
    for position in rng.choice(len(whole), 250, replace=False):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            train, test = data.load(f"npz:{path}")
        except ValueError as error:
            assert "set.npz" in str(error)  # noqa: PT017
        else:
            np.testing.assert_array_equal(train.x[..., 0], arrays["x_train"])
            np.testing.assert_array_equal(test.y, arrays["y_test"])


def test_unknown_names():
    with pytest.raises(ValueError, match="Did you mean 'fashion_mnist'"):
        data.load("fashion-mnist")
    with pytest.raises(ValueError, match="must follow the colon"):
        data.load("npz:")
    with pytest.raises(ValueError, match="must be one of"):
        data.load("zip:file")
    for name in ("csv:a.csv", "a.csv"):
        with pytest.raises(ValueError, match=r"data.from_table\('a.csv', client="):
            data.load(name)
    for name in (None, 3):
        with pytest.raises(TypeError, match=f"name is {name}, a .*; it must be text, such as 'dig"):
            data.load(name)


def test_fashion_mnist_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist`, pass"):
        data.load("fashion_mnist")


def test_fashion_mnist_is_read_from_the_given_folder_alone(tmp_path, monkeypatch):
    debian, empty = tmp_path / "debian", tmp_path / "empty"
    debian.mkdir()
    empty.mkdir()
    write_idx(debian)
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", debian)
    assert len(data.load("fashion_mnist")[0].y) == 12
    with pytest.raises(FileNotFoundError, match=f"no IDX files in {empty}.* omit data_dir, pass"):
        data.load("fashion_mnist", data_dir=empty)


def test_debian_fashion_mnist():
    if not sources.DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    train, test = data.load("fashion_mnist")
    assert train.x.shape == (60000, 28, 28, 1)
    assert test.x.shape == (10000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(train.y), np.full(10, 6000))
    np.testing.assert_array_equal(np.bincount(test.y), np.full(10, 1000))


def test_missing_tfds(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'tensorflow-datasets[<>]"):
        data.load("cifar10")


def png(image):
    """The image as a PNG file: TFDS stores encoded images and would encode with TensorFlow."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width, channels = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + chunks)


def tfds_images(split, channels):
    rng = np.random.default_rng(split == "train")
    return rng.integers(0, 256, (20 if split == "train" else 6, 7, 5, channels), dtype=np.uint8)


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A prepared TFDS directory with two small sets, ``small_shapes`` (RGB) and ``mnist``."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = tmp_path_factory.mktemp("tfds")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        channels = 3

        def _info(self):
            image = tfds.features.Image(shape=(7, 5, self.channels))
            label = tfds.features.ClassLabel(num_classes=4)
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict({"image": image, "label": label}),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in ("train", "test")}

        def _generate_examples(self, split):
            for i, image in enumerate(tfds_images(split, self.channels)):
                yield i, {"image": png(image), "label": i % 3}

    class SmallShapes(Builder, skip_registration=True):
        pass

    class Mnist(Builder, skip_registration=True):
        name = "mnist"
        VERSION = tfds.core.Version("3.0.1")
        channels = 1

    for builder in (SmallShapes, Mnist):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


@pytest.mark.parametrize(
    ("name", "channels"), [("tfds:small_shapes", 3), ("mnist", 1), ("tfds:mnist", 1)]
)
def test_tfds(tfds_dir, name, channels):
    for split, found in zip(("train", "test"), data.load(name, data_dir=tfds_dir), strict=True):
        expected = tfds_images(split, channels)
        assert found.x.dtype == np.uint8
        assert found.y.dtype == np.int32
        assert found.x.shape == expected.shape
        # TFDS shuffles when it prepares; the images identify themselves.
        place = {image.tobytes(): i for i, image in enumerate(expected)}
        order = [place[image.tobytes()] for image in found.x]
        assert sorted(order) == list(range(len(expected)))
        np.testing.assert_array_equal(found.y, np.array(order) % 3)


def test_tfds_is_read_without_tensorflow(tfds_dir):
    train, _ = data.load("tfds:small_shapes", data_dir=tfds_dir)
    assert train.x.shape == (20, 7, 5, 3)
    assert "tensorflow" not in sys.modules


def test_tfds_errors(tfds_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match="tfds build cifar10 --file_format=array_record"):
        data.load("cifar10", data_dir=tmp_path)
    with pytest.raises(ValueError, match="knows no such data set"):
        data.load("tfds:no_such_set", data_dir=tmp_path)
    with pytest.raises(ValueError, match="tfds:a b"):
        data.load("tfds:a b", data_dir=tfds_dir)
