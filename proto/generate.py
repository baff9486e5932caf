"""The only way the Python stubs beside the protos are made: `python proto/generate.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from google.rpc import status_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes *_pb2.py and *_pb2.pyi for every proto under pd/, and *_pb2_grpc.py and .pyi for those with a service.

    Raises:
        SystemExit: protoc refused a file; its message is on standard error.

    """
    protos = sorted(ROOT.glob("pd/**/*.proto"))
    services = [path for path in protos if "\nservice " in path.read_text()]
    _protoc([f"--python_out={out}", f"--pyi_out={out}"], protos)
    # Named by its path, so that the environment it lives in need not be activated.
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    _protoc(
        [f"--grpc_python_out={out}", f"--plugin=protoc-gen-mypy_grpc={plugin}", f"--mypy_grpc_out=quiet:{out}"],
        services,
    )


def write_image(file: Path) -> None:
    """Writes all protos, what they import and their comments as one descriptor set, which buf can read offline."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _protoc([f"--descriptor_set_out={file}", "--include_imports", "--include_source_info"], ROOT.glob("pd/**/*.proto"))


def _protoc(outputs: list[str], protos: Iterable[Path]) -> None:
    includes = [str(resources.files("grpc_tools") / "_proto"), str(_google_rpc_root()), str(ROOT)]
    files = [str(path.relative_to(ROOT)) for path in protos]
    code = protoc.main(["protoc", *(f"-I{include}" for include in includes), *outputs, *files])
    if code:
        sys.exit(code)


def _google_rpc_root() -> Path:
    """Folder that holds google/rpc/status.proto (googleapis-common-protos)."""
    return Path(status_pb2.__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="where to write the stubs (default: beside the protos)")
    parser.add_argument("--image", type=Path, help="write a descriptor set for `buf lint` instead of stubs")
    arguments = parser.parse_args()
    if arguments.image:
        write_image(arguments.image)
    else:
        generate(arguments.out)


if __name__ == "__main__":
    main()
