"""CIFAR's archives, EMNIST's files and folders of images, against the pixels that were written."""

import gzip
import io
import pickle
import struct
import sys
import tarfile

import numpy as np
import pytest
from scipy.io import savemat

from fedjax_lab import data
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.loading import load_divided

rng = np.random.default_rng(0)
TEN = {f"data_batch_{i}": 2 for i in range(1, 6)} | {"test_batch": 3}
SETS = {
    "cifar10": (TEN, ["labels"], "cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": (
        {"train": 8, "test": 3},
        ["coarse_labels", "fine_labels"],
        "cifar-100-python",
        "cifar-100-binary",
    ),
}
CLASSES = {"labels": 10, "coarse_labels": 20, "fine_labels": 100}


def images_of(name):
    """File -> images [n, 32, 32, 3], and its labels of each kind."""
    return {
        file: (
            rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8),
            {kind: rng.integers(0, CLASSES[kind], n).tolist() for kind in SETS[name][1]},
        )
        for file, n in SETS[name][0].items()
    }


def planes(image):
    """Red, green and blue, each row by row, as the data set's page says."""
    return b"".join(image[:, :, channel].tobytes() for channel in range(3))


def binary(x, labels):
    rows = zip(x, *labels.values(), strict=True)
    return b"".join(bytes(kinds) + planes(image) for image, *kinds in rows)


def text(string):
    return b"U" + bytes([len(string)]) + string.encode()


def pickled(x, labels):
    """As Python 2 wrote it: protocol 2, with byte strings."""
    pixels = b"".join(map(planes, x))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    )
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNN"
    dtype += b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    shape = b"K" + bytes([len(x)]) + b"M\x00\x0c\x86"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"t"
    lists = (
        text(kind) + b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"
        for kind, values in labels.items()
    )
    return b"\x80\x02}(" + text("data") + array + state + b"b" + b"".join(lists) + b"u."


def write_archive(path, folder, contents, links=()):
    with tarfile.open(path, "w:gz") as archive:
        for file, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{file}" if folder else file)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def contents_of(found, form):
    if form == "python":
        return {file: pickled(*part) for file, part in found.items()} | {"batches.meta": b"x"}
    return {f"{file}.bin": binary(*part) for file, part in found.items()}


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("name", SETS)
def test_cifar(name, form, tmp_path):
    found = images_of(name)
    contents = contents_of(found, form)
    archive = write_archive(tmp_path / "a.tar.gz", SETS[name][2 + (form == "binary")], contents)
    folder = tmp_path / "folder"
    folder.mkdir()
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    test = list(found)[-1]
    for kind in SETS[name][1]:
        option = {"labels": "coarse"} if kind.startswith("coarse") else {}
        for path in (archive, folder):
            parts = data.load(f"{name}:{path}", **option)
            for part, files in zip(parts, ([f for f in found if f != test], [test]), strict=True):
                np.testing.assert_array_equal(part.x, np.concatenate([found[f][0] for f in files]))
                np.testing.assert_array_equal(part.y, [v for f in files for v in found[f][1][kind]])
                assert (part.x.dtype, part.y.dtype) == (np.uint8, np.int32)


def test_cifar_as_python_3_pickles_it_and_on_the_command_line(tmp_path):
    """Copies of the set have been pickled again, by a newer NumPy."""
    found = images_of("cifar100")
    contents = {
        file: pickle.dumps(
            {
                b"data": np.frombuffer(b"".join(map(planes, x)), np.uint8).reshape(len(x), 3072),
                **{kind.encode(): values for kind, values in labels.items()},
            },
            protocol=2,
        )
        for file, (x, labels) in found.items()
    }
    path = write_archive(tmp_path / "a.tar.gz", "./cifar-100-python", contents)
    config = RunConfig.of(dataset=f"cifar100:{path}", labels="coarse", partition="iid")
    train = load_divided(config.data, config.partition_seed).train
    np.testing.assert_array_equal(train.x, found["train"][0])
    np.testing.assert_array_equal(train.y, found["train"][1]["coarse_labels"])
    assert "labels" not in RunConfig.of(dataset=f"cifar100:{path}").record()
    with pytest.raises(ValueError, match="labels is 'coarse'; cifar10:x has labels of one kind"):
        data.load("cifar10:x", labels="coarse")
    with pytest.raises(FileNotFoundError, match="no archive or folder x"):
        data.load("cifar10:x")


class Attack:
    def __reduce__(self):
        return exec, ("import sys; sys.attacked = True",)


def test_damaged_cifar(tmp_path):
    ten, hundred = images_of("cifar10"), images_of("cifar100")
    good, folder = contents_of(ten, "python"), "cifar-10-batches-py"
    path = tmp_path / "a.tar.gz"

    def refuses(message, *, within=folder, links=(), **changes):
        contents = {file: changes.get(file, content) for file, content in good.items()}
        kept = {file: content for file, content in contents.items() if content is not None}
        write_archive(path, within, kept, links)
        with pytest.raises(ValueError, match=message) as error:
            data.load(f"cifar10:{path}")
        assert str(path) in str(error.value)

    refuses("names __builtin__.exec, which is not run", data_batch_2=pickle.dumps(Attack(), 2))
    assert not hasattr(sys, "attacked")
    refuses("data_batch_3 is damaged, or no batch", data_batch_3=good["data_batch_3"][:-9])
    refuses("test_batch is damaged", test_batch=pickled(*hundred["test"]))  # no such labels
    refuses("data_batch_1 is damaged", data_batch_1=pickle.dumps([1]))
    x, _ = ten["data_batch_4"]
    refuses(
        r"data_batch_4 has labels between 3 and 10; they must be in \[0, 10\)",
        data_batch_4=pickled(x, {"labels": [10, 3]}),
    )
    refuses("no file data_batch_5 of cifar10", data_batch_5=None)
    # A link is no file, and a folder of another name is not the set's.
    link = [(f"{folder}/data_batch_5", "/etc/passwd")]
    refuses("no file data_batch_5 of cifar10", data_batch_5=None, links=link)
    refuses("no files of cifar10; there must be", within=f"../{folder}")
    for cut in (0, 10, 2000, -30):
        write_archive(path, folder, good)
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"a\.tar\.gz: (no tar|no file)"):
            data.load(f"cifar10:{path}")
    write_archive(path, "cifar-100-binary", contents_of(hundred, "binary"))
    with pytest.raises(ValueError, match=r"no files of cifar10; .* cifar-10-batches-bin"):
        data.load(f"cifar10:{path}")
    cut = contents_of(hundred, "binary")
    cut["test.bin"] = cut["test.bin"][:-1]
    write_archive(path, "cifar-100-binary", cut)
    with pytest.raises(ValueError, match=r"test\.bin has 9,221 bytes; .* records of 3,074 bytes"):
        data.load(f"cifar100:{path}")


@pytest.mark.parametrize("form", ["python", "binary"])
def test_a_flipped_byte_of_a_cifar_archive(form, tmp_path):
    """Deflate passes most of them; the checksum stands behind all files of the archive."""
    folder = SETS["cifar100"][2 + (form == "binary")]
    contents = contents_of(images_of("cifar100"), form)
    path = write_archive(tmp_path / "a.tar.gz", folder, contents)
    whole = path.read_bytes()
    for place in (*range(1000, len(whole) - 100, len(whole) // 20), -8, -7, -4, -1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.tar\.gz: .*damaged"):
            data.load(f"cifar100:{path}")
    path.write_bytes(whole)
    assert len(data.load(f"cifar100:{path}")[0].x) == 8


def test_emnist_is_upright_in_both_forms(tmp_path):
    """A letter L, written as the files have it: column after column."""
    letter = np.zeros((28, 28), np.uint8)
    letter[4:24, 6:9] = 200  # the stem, on the left
    letter[21:24, 6:20] = 250  # the foot, at the bottom
    x = np.stack([letter, np.roll(letter, 3, axis=1), rng.integers(0, 256, (28, 28), np.uint8)])
    columns = np.stack([image.ravel(order="F") for image in x])
    labels = np.array([1, 2, 26], np.uint8)  # A, B and Z
    for split in ("letters", "digits"):
        for part in ("train", "test"):
            for kind, values in (
                ("images-idx3", columns.reshape(3, 28, 28)),
                ("labels-idx1", labels),
            ):
                head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
                file = tmp_path / f"emnist-{split}-{part}-{kind}-ubyte.gz"
                file.write_bytes(gzip.compress(head + values.tobytes()))
    both = {"images": columns, "labels": labels[:, None]}
    savemat(tmp_path / "emnist-letters.mat", {"dataset": {"train": both, "test": both}})
    for name in ("emnist-letters.mat", "emnist-letters"):
        for part in data.load(f"emnist:{tmp_path / name}"):
            np.testing.assert_array_equal(part.x[..., 0], x)
            np.testing.assert_array_equal(part.y, [0, 1, 25])
    with pytest.raises(ValueError, match=r"the splits emnist-digits, emnist-letters; .* one"):
        data.load(f"emnist:{tmp_path}")
    (tmp_path / "alone").mkdir()
    for file in tmp_path.glob("emnist-digits*"):
        file.rename(tmp_path / "alone" / file.name)
    np.testing.assert_array_equal(data.load(f"emnist:{tmp_path / 'alone'}")[1].x[..., 0], x)


def test_emnist_with_a_single_image(tmp_path):
    x = rng.integers(0, 256, (3, 784), dtype=np.uint8)
    parts = {
        part: {"images": x[:n], "labels": np.arange(1, n + 1, dtype=np.uint8)[:, None]}
        for part, n in (("train", 3), ("test", 1))
    }
    savemat(tmp_path / "emnist.mat", {"dataset": parts})
    train, test = data.load(f"emnist:{tmp_path / 'emnist.mat'}")
    assert train.x.shape == (3, 28, 28, 1)
    np.testing.assert_array_equal(test.x[0, ..., 0], x[0].reshape(28, 28).T)
    np.testing.assert_array_equal(test.y, [0])


def test_damaged_emnist(tmp_path):
    path = tmp_path / "emnist-letters.mat"
    with pytest.raises(FileNotFoundError, match=r"no file .*letters\.mat"):
        data.load(f"emnist:{path}")
    with pytest.raises(FileNotFoundError, match=r"the splits \(none\)"):
        data.load(f"emnist:{tmp_path}")
    part = {"images": np.zeros((4, 784), np.uint8), "labels": np.ones((4, 1), np.uint8)}
    savemat(path, {"dataset": {"train": part, "test": part}})
    whole = path.read_bytes()
    for content in (whole[:100], whole[:-40], b"x" * 300):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"letters\.mat: damaged, or no file of EMNIST"):
            data.load(f"emnist:{path}")
    savemat(
        path, {"dataset": {"train": part, "test": part | {"labels": np.ones((3, 1), np.uint8)}}}
    )
    with pytest.raises(
        ValueError, match=r"test has images uint8 \[4, 784\] and labels uint8 \[3\]"
    ):
        data.load(f"emnist:{path}")


def test_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    x = rng.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    for i, place in enumerate(("train/dog", "train/cat", "val/dog", "train/dog")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        image.fromarray(x[i]).save(tmp_path / place / f"{i}.png")
    (tmp_path / "train/dog/.hidden").write_text("no image")
    train, test = data.load(f"images:{tmp_path}")
    np.testing.assert_array_equal(train.x, x[[1, 0, 3]])  # cat, dog, dog
    np.testing.assert_array_equal(train.y, [0, 1, 1])
    np.testing.assert_array_equal(test.x, x[2:3])
    np.testing.assert_array_equal(test.y, [1])
    other = tmp_path / "train/cat/gray.png"
    image.fromarray(x[0, :, :4, 0]).save(other)
    with pytest.raises(ValueError, match=r"gray\.png: 5 x 4 pixels, and .*png 5 x 6; all must"):
        data.load(f"images:{tmp_path}")
    scaled, _ = data.load(f"images:{tmp_path}", image_size=10)
    assert scaled.x.shape == (4, 10, 10, 3)
    np.testing.assert_allclose(scaled.x[0].mean((0, 1)), x[1].mean((0, 1)), atol=8)
    other.write_bytes(other.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"gray\.png is no image that can be read"):
        data.load(f"images:{tmp_path}", image_size=10)
    image.fromarray(np.zeros((5, 6), np.uint16)).save(other)
    with pytest.raises(ValueError, match=r"gray\.png .* its mode is I;16, not of 8 bits"):
        data.load(f"images:{tmp_path}")


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [  # EXIF: where the stored first row and column belong
        (1, lambda x: x),
        (2, lambda x: x[:, ::-1]),
        (3, lambda x: x[::-1, ::-1]),
        (4, lambda x: x[::-1]),
        (5, lambda x: x.transpose(1, 0, 2)),
        (6, lambda x: np.rot90(x, -1)),
        (7, lambda x: x.transpose(1, 0, 2)[::-1, ::-1]),
        (8, lambda x: np.rot90(x)),
    ],
)
def test_images_are_turned_as_their_exif_says(orientation, upright, tmp_path):
    image = pytest.importorskip("PIL.Image")
    x = rng.integers(0, 256, (2, 5, 6, 3), dtype=np.uint8)
    x[1] = np.arange(5)[:, None, None] * 40 + np.arange(6)[:, None]  # smooth: JPEG changes little
    exif = image.Exif()
    exif[0x0112] = orientation
    for i, name in enumerate(("train/a/0.png", "test/a/1.jpg")):
        (tmp_path / name).parent.mkdir(parents=True)
        options = {"quality": 100, "subsampling": 0} if name.endswith("jpg") else {}
        image.fromarray(x[i]).save(tmp_path / name, exif=exif, **options)
    train, test = data.load(f"images:{tmp_path}")
    np.testing.assert_array_equal(train.x[0], upright(x[0]))
    np.testing.assert_allclose(test.x[0].astype(int), upright(x[1]).astype(int), atol=3)
    if orientation == 6:
        image.fromarray(x[0]).save(tmp_path / "train/a/upright.png")
        with pytest.raises(
            ValueError, match=r"upright\.png: 5 x 6 pixels, and .*0\.png 6 x 5; all"
        ):
            data.load(f"images:{tmp_path}")
        # An EXIF that cannot be read says nothing.
        for file in ("train/a/upright.png", "train/a/0.png", "test/a/1.jpg"):
            image.fromarray(x[0]).save(tmp_path / file, exif=b"Exif\0\0no TIFF header")
        np.testing.assert_array_equal(data.load(f"images:{tmp_path}")[0].x, x[[0, 0]])


def test_gray_images_without_a_test_folder(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    x = rng.integers(0, 256, (12, 4, 4), dtype=np.uint8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(12):
            image.fromarray(x[i]).save(tmp_path / name / f"{i:02}.png")
    train, test = data.load(f"images:{tmp_path}")
    np.testing.assert_array_equal(train.x[..., 0], np.concatenate([x[:11], x[:11]]))
    np.testing.assert_array_equal(test.x[..., 0], x[[11, 11]])  # the last tenth of each
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match="has train alone"):
        data.load(f"images:{tmp_path}")
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "test" / "c").mkdir(parents=True)
    image.fromarray(x[0]).save(tmp_path / "train" / "a" / "0.png")
    with pytest.raises(ValueError, match="the training set has no class 'c'"):
        data.load(f"images:{tmp_path}")
    # Files beside the classes are passed over, in both parts.
    (tmp_path / "test" / "c").rename(tmp_path / "test" / "a")
    image.fromarray(x[5]).save(tmp_path / "test" / "a" / "5.png")
    for part in ("train", "test"):
        (tmp_path / part / "readme.txt").write_text("images of letters")
    train, test = data.load(f"images:{tmp_path}")
    np.testing.assert_array_equal(train.x[..., 0], x[:1])
    np.testing.assert_array_equal(test.x[..., 0], x[5:6])
    for part in ("train", "test"):  # a level more than there may be
        (tmp_path / part / "a" / "old").mkdir()
        with pytest.raises(ValueError, match=r"a/old is a folder; the images of a class must lie"):
            data.load(f"images:{tmp_path}")
        (tmp_path / part / "a" / "old").rmdir()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"needs the package Pillow: `pip install '"):
        data.load(f"images:{tmp_path}")
