"""Writes the wheel: `python3 pack.py LIBRARY KERNELS OUT`, with the compiled module, a folder of compiled kernels and the folder that the wheel goes to.

A wheel is an archive with three files of metadata, so that this needs nothing but Python. The same inputs give the same bytes.
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIMIT = 20 << 20
REQUIRES = "Requires-Python: >=3.10"


def version():
    return re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M).group(1)


def platform(library):
    """The oldest glibc whose symbols the module names, as a platform of wheels (PEP 600)."""
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_x86_64"


def files(library, kernels):
    """Names in the wheel, and contents."""
    package = ROOT / "oxtile"
    for path in sorted(package.iterdir()):
        if path.suffix in (".py", ".pyi", ".typed"):
            yield f"oxtile/{path.name}", path.read_bytes()
    yield "oxtile/_oxtile.abi3.so", library
    for path in sorted(kernels.rglob("*")):
        if path.suffix in (".cubin", ".json"):
            yield f"oxtile/kernels/{path.relative_to(kernels)}", path.read_bytes()


def metadata(tag):
    described = (ROOT / "README.md").read_text()
    head = ["Metadata-Version: 2.4", "Name: oxtile", f"Version: {version()}", REQUIRES, "License-Expression: MIT OR Apache-2.0"]
    head += ["Summary: Attention with gradients and low-precision formats, by GPU kernels written in Rust", "License-File: LICENSE-MIT", "License-File: LICENSE-APACHE"]
    head += ["Description-Content-Type: text/markdown", "", described]
    folder = f"oxtile-{version()}.dist-info"
    yield f"{folder}/METADATA", "\n".join(head).encode()
    yield f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: oxtile\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    for name in ("LICENSE-MIT", "LICENSE-APACHE"):
        yield f"{folder}/licenses/{name}", (ROOT.parent / name).read_bytes()


def main(library, kernels, out):
    library = Path(library).read_bytes()
    tag = f"cp310-abi3-{platform(library)}"
    wheel = Path(out) / f"oxtile-{version()}-{tag}.whl"
    for old in Path(out).glob("oxtile-*.whl"):
        old.unlink()
    record, folder = [], f"oxtile-{version()}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(name, content):
            # The oldest time that an archive can say, and a plain file's mode.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)

        for name, content in [*files(library, Path(kernels)), *metadata(tag)]:
            add(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}\n")
        add(f"{folder}/RECORD", "".join([*record, f"{folder}/RECORD,,\n"]))
    size = wheel.stat().st_size
    if size > LIMIT:
        sys.exit(f"{wheel} has {size} bytes, {LIMIT} are allowed: look at the largest with `unzip -v`")
    print(wheel)


if __name__ == "__main__":
    main(*sys.argv[1:])
