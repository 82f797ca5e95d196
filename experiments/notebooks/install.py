"""The first cell of all notebooks: installs the package where it is missing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

# What to install: a checkout's folder, a wheel or a zip of it, or a folder that holds one (Colab:
# upload it, or mount Drive and name its folder there); or "git+https://..." of its repository.
SOURCE = os.environ.get("FEDJAX_LAB_SOURCE", "")  # empty: what lies in this folder or above it
TOKEN = os.environ.get("FEDJAX_LAB_TOKEN", "")  # of a repository that is not public
QUICK = os.environ.get("FEDJAX_LAB_QUICK") == "1"


def find_source(source):
    """What pip is to install; never a bare name, which anyone could have registered."""
    if source.startswith("git+https://"):
        return source.replace("https://", f"https://{TOKEN}@" if TOKEN else "https://", 1)
    here, drive = Path.cwd(), Path("/content/drive/MyDrive")
    places = [Path(source).expanduser()] if source else [here, *here.parents, drive]
    for place in places:
        if place.is_file() and place.suffix in (".whl", ".zip"):
            return str(place)
        if all((place / part).exists() for part in ("pyproject.toml", "fedjax_lab/__init__.py")):
            return str(place)
        packed = [*place.glob("fedjax_lab*.whl"), *place.glob("fedjax_lab*.zip")]
        if packed:
            return str(max(packed, key=os.path.getmtime))
    raise FileNotFoundError(
        f"SOURCE is {source!r}, where there is no fedjax_lab. Set it in this cell to one of: a "
        "checkout's folder; a wheel or a zip of it, uploaded here; a folder that holds one, such "
        "as '/content/drive/MyDrive/fedjax_lab' once Drive is mounted; or "
        "'git+https://HOST/OWNER/REPO' (with TOKEN, if it is not public)."
    )


if importlib.util.find_spec("fedjax_lab") is None:
    # Colab's own jax stays, which knows Colab's accelerators.
    keep = [] if importlib.util.find_spec("jax") is None else ["--no-deps"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *keep, find_source(SOURCE)]
    if subprocess.run(pip, check=False).returncode != 0:
        raise RuntimeError("pip could not install fedjax_lab; its message stands above.")
    importlib.invalidate_caches()
