"""A folder of image files in which each sub-folder is a class. Pillow decodes the files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.checks import errors_about
from fedjax_lab.data.files import Splits
from fedjax_lab.machine.extras import imported

# Names of the folders of a test set.
TEST_FOLDERS = ("test", "val", "valid", "validation")
_GRAY, _COLOURS = (
    ("1", "L", "LA"),
    ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
)
_ORIENTATION = 0x0112  # EXIF's tag: 1 is upright, 2 to 8 are turned or mirrored
_ON_ITS_SIDE = (5, 6, 7, 8)
_PNG_EXIF = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"}


def read_image_folder(folder: Path, name: str, size: int | None) -> tuple[Splits, int]:
    """Read the images of a folder.

    The folder has train and test (or val, valid, validation), and each of them a sub-folder for
    each class. Or it has the classes' sub-folders itself: then the last tenth of each class, in the
    order of the files' names, is the test set. Classes are numbered in the order of their names.
    Names that begin with a dot are passed over, and so are files beside the sub-folders. Images are
    turned and mirrored as their EXIF orientation says, as programs show them (in PNG files, if it
    stands before the pixels).

    Args:
      size: height and width to which images are scaled (bilinear, without regard to their shape).
        None: all must have one size.

    Returns:
      Of each split, x uint8 [n, H, W, C] and y integers [n]; and the number of classes. C is 1 if
      all images are gray, and else 3 (red, green, blue); transparency is left out.

    Raises:
      FileNotFoundError: there is no such folder, or it has no classes or images.
      ImportError: Pillow is missing.
      ValueError: a file is no image, or of more than 8 bits a channel; images differ in size; a
        class has sub-folders; or the test set has a class that the training set has not.
    """
    imported("PIL.Image", f"{name} needs the package Pillow", "images")
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {folder}.")
    files, classes = _files(folder)
    heads = {file: _head(file) for part in files.values() for file, _ in part}
    (first, (_, height, width)), *rest = heads.items()
    for other, (_, *its_size) in rest:
        if size is None and its_size != [height, width]:
            raise ValueError(
                f"{other}: {its_size[0]} x {its_size[1]} pixels, and {first} {height} x {width}; "
                "all must have one size. image_size=64, for example, scales them."
            )
    mode = "L" if all(head[0] in _GRAY for head in heads.values()) else "RGB"
    height, width = (height, width) if size is None else (size, size)
    channels = 1 if mode == "L" else 3
    splits = {}
    for part, of_part in files.items():
        x = np.empty((len(of_part), height, width, channels), np.uint8)
        for place, (file, _) in enumerate(of_part):
            x[place] = _decode(file, mode, (width, height)).reshape(x.shape[1:])
        splits[part] = x, np.array([label for _, label in of_part], np.int64)
    return splits, classes


def _files(folder: Path) -> tuple[dict[str, list[tuple[Path, int]]], int]:
    """Return each part's (file, class), and the number of classes."""
    test = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    is_divided = (folder / "train").is_dir()
    if is_divided != (test is not None):
        raise FileNotFoundError(
            f"{folder} has {test.name if test else 'train'} alone; there must be train and one of "
            f"{', '.join(TEST_FOLDERS)}, or a sub-folder for each class."
        )
    train = folder / "train" if is_divided else folder
    folders = [entry for entry in _entries(train) if entry.is_dir()]
    if not folders:
        raise FileNotFoundError(f"{train} has no sub-folders; there must be one for each class.")
    found: dict[str, list[tuple[Path, int]]] = {"train": [], "test": []}
    for label, of_class in enumerate(folders):
        images = [(file, label) for file in _images(of_class)]
        held = 0 if is_divided else max(1, len(images) // 10)
        if len(images) <= held:
            raise FileNotFoundError(
                f"{of_class} has {len(images)} files; there must be "
                f"{'one' if is_divided else 'two'} or more."
            )
        end = len(images) - held
        found["train"] += images[:end]
        found["test"] += images[end:]
    classes = [of_class.name for of_class in folders]
    if test is not None:
        for entry in filter(Path.is_dir, _entries(test)):
            if entry.name not in classes:
                raise ValueError(
                    f"{entry}: the training set has no class {entry.name!r}; it has "
                    f"{', '.join(classes)}."
                )
            found["test"] += [(file, classes.index(entry.name)) for file in _images(entry)]
        if not found["test"]:
            raise FileNotFoundError(f"{test} has no images.")
    return found, len(classes)


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _images(of_class: Path) -> list[Path]:
    entries = _entries(of_class)
    for entry in filter(Path.is_dir, entries):
        raise ValueError(
            f"{entry} is a folder; the images of a class must lie in {of_class} itself. If its "
            "sub-folders are the classes, give the folder that holds them."
        )
    return entries


def _head(file: Path) -> tuple[str, int, int]:
    """Return an image's mode, height and width, upright; the pixels are not read."""
    with _opened(file) as image:
        if _orientation(image) in _ON_ITS_SIDE:
            return image.mode, image.width, image.height
        return image.mode, image.height, image.width


def _orientation(image: Any) -> int:
    """Return the EXIF orientation; 1 without one, or if the EXIF is damaged."""
    if image.format == "PNG" and not _PNG_EXIF & set(image.info):
        return 1  # getexif would read the pixels, to search behind them
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises many kinds for a damaged file
        return 1


def _decode(file: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    """Return an image's pixels upright, in the given mode and (width, height): uint8 [H, W] or
    [H, W, 3]."""
    from PIL import Image, ImageOps

    with _opened(file) as image:
        upright = image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
        converted = upright.convert(mode)
        if converted.size != size:
            converted = converted.resize(size, Image.Resampling.BILINEAR)
        return np.asarray(converted)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image; what fails in the context is an error of the file."""
    from PIL import Image

    with errors_about(f"{file} is no image that can be read"), Image.open(file) as image:
        if image.mode not in (*_GRAY, *_COLOURS):
            raise ValueError(f"its mode is {image.mode}, not of 8 bits a channel")
        yield image
