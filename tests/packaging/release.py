"""Build the wheel and the source archive of a release into ``dist``.

    python tests/packaging/release.py --tag v0.4.0 --home https://host/owner/name

The tag has to be the version's, and the changelog has to have a head for it. The addresses in the
metadata (source, changelog, issues) are made of ``--home``, because they depend on where the
repository lives; without it there are none.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
from check_wheel import LEFT_OUT, PIP, ROOT, call

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_PAGES = {"Source": "", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


def main() -> None:
    """Check the tag, build both archives; ends with an error at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", required=True, help="such as v0.4.0")
    parser.add_argument("--home", default="", help="address of the repository; none by default")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    asked = parser.parse_args()
    version = _VERSION.search((ROOT / "fedjax_lab" / "version.py").read_text())[1]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if problem := problem_of(asked.tag, version, changelog):
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="fedjax-lab-release-") as name:
        source, venv = Path(name) / "source", Path(name) / "venv"
        shutil.copytree(ROOT, source, ignore=LEFT_OUT)
        project = source / "pyproject.toml"
        project.write_text(project.read_text(encoding="utf-8") + urls(asked.home), encoding="utf-8")
        call(sys.executable, "-m", "venv", venv)
        call(venv / "bin" / "python", *PIP, "install", "build>=1.2,<2")
        call(venv / "bin" / "python", "-m", "build", "--outdir", asked.out.resolve(), source)


def problem_of(tag: str, version: str, changelog: str) -> str:
    """What keeps a tag from being released; "": nothing."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and fedjax_lab/version.py has {version}: make them one."
    if re.search(r"dev|rc|a|b", version):
        return f"{version} is no release; set the version in fedjax_lab/version.py first."
    heads = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    if version not in heads:
        return f"CHANGELOG.md has no head '## {version}'; its newest is '## {heads[0]}'."
    return ""


def urls(home: str) -> str:
    """The addresses as pyproject.toml has them."""
    home = home.rstrip("/")
    lines = [f'{name} = "{home}{page}"' for name, page in _PAGES.items()]
    return "\n".join(["\n[project.urls]", *lines, ""]) if home else ""


if __name__ == "__main__":
    main()
