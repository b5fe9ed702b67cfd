# SPDX-License-Identifier: Apache-2.0
"""Generates the modules of the interface before each build; pyproject.toml has everything else.

A source distribution contains these modules, but not the interface that they are generated from.
"""

import shutil
import tempfile
from pathlib import Path

from setuptools import setup

SOURCES = Path(__file__).resolve().parent / "src"
INTERFACE = SOURCES.parents[2] / "proto"
PACKAGES = ("patchbay/options/v1", "patchbay/v1")
# The plugins of mypy-protobuf generate the types.
PLUGINS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate() -> None:
    """Generates messages, clients and their types."""
    import grpc_tools.protoc

    common = Path(grpc_tools.__file__).with_name("_proto")
    arguments = ["protoc", f"--proto_path={INTERFACE}", f"--proto_path={common}"]
    for package in PACKAGES:
        arguments += map(str, sorted((INTERFACE / package).glob("*.proto")))
    with tempfile.TemporaryDirectory() as folder:
        arguments += [f"--{plugin}_out={folder}" for plugin in PLUGINS]
        if grpc_tools.protoc.main(arguments) != 0:
            raise SystemExit(f"{INTERFACE} cannot be translated; protoc's messages are above")
        # The old modules are removed only after all new ones were generated.
        for package in PACKAGES:
            for old in (SOURCES / package).glob("*_pb2*"):
                old.unlink()
        shutil.copytree(folder, SOURCES, dirs_exist_ok=True)


# PKG-INFO exists in a source distribution, which does not contain the folders above it.
IS_DISTRIBUTION = SOURCES.with_name("PKG-INFO").is_file()

if not IS_DISTRIBUTION and (INTERFACE / PACKAGES[-1]).is_dir():
    generate()
elif not (SOURCES / PACKAGES[-1] / "guest_pb2.py").is_file():
    raise SystemExit(f"there is no {INTERFACE}: build the package in a clone of the whole repository")

if __name__ == "__main__":
    setup()
