"""Run a notebook from its top as a user does: in an empty directory, where kdpkit is not installed.

    python -m tools.notebooks recipes/colab_gpu.ipynb --pictures recipes/images

runs it at full size and writes the pictures that it shows, each under the name of its cell's tag.
`--output FILE` keeps the notebook with its outputs, and a cell more that says where kdpkit lay.
`--keep` keeps what its cells print in the notebook itself.
"""

import argparse
import base64
import contextlib
import json
import os
import pathlib
import re
import signal
import site
import sys
import tempfile
import venv

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import kdpkit

CHECKOUT = pathlib.Path(kdpkit.__file__).parent.parent
SETTINGS = "parameters"
PICTURE = "picture-"
WHERE = "import kdpkit, keras\nprint(kdpkit.__file__, keras.backend.backend())"


def tags(cell):
    return cell.metadata.get("tags", [])


def is_picture(cell):
    return any(tag.startswith(PICTURE) for tag in tags(cell))


def run(path, directory, **settings):
    """Return the notebook with its outputs, run in `directory` with other settings."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    (cell,) = (cell for cell in notebook.cells if SETTINGS in tags(cell))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in settings.items())
    notebook.cells.append(nbformat.v4.new_code_cell(WHERE))
    work = directory / "content"
    work.mkdir()
    client = NotebookClient(
        notebook,
        timeout=1800,
        km=AsyncKernelManager(
            kernel_name="fresh", kernel_spec_manager=_kernels(directory, _python(directory))
        ),
        resources={"metadata": {"path": str(work)}},
    )
    try:
        return client.execute()
    finally:
        _end_tensorboards(directory)


def pictures(notebook):
    """Return the PNG pictures that the tagged cells show, by what follows the tag's `picture-`."""
    return {
        tag.removeprefix(PICTURE): base64.b64decode(output.data["image/png"])
        for cell in notebook.cells
        for tag in tags(cell)
        if tag.startswith(PICTURE)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    }


def keep_prints(path, done):
    """Write what the cells of a run have printed into the notebook, as a terminal shows it."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    for cell, ran in zip(notebook.cells, done.cells, strict=False):
        streams = [each for each in ran.get("outputs", []) if each.get("name") == "stdout"]
        if text := shown("".join(stream.text for stream in streams)):
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    nbformat.write(notebook, path)


def shown(printed):
    """Return what a terminal shows of a text with colors, and bars that are written again."""
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]|\x08", "", printed)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.replace("\r\n", "\n").split("\n")]
    return "".join(f"{line}\n" for line in lines if line)


def _python(directory):
    """Make a Python that has our packages, but not kdpkit, and does not change them."""
    others = directory / "others"
    others.mkdir()
    for packages in map(pathlib.Path, site.getsitepackages()):
        for entry in packages.iterdir():
            if "kdpkit" not in entry.name:
                (others / entry.name).symlink_to(entry)
    venv.create(directory / "venv")  # with the pip of the other packages
    (packages,) = (directory / "venv").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(others))
    return directory / "venv" / "bin" / "python"


def _kernels(directory, python):
    kernel = directory / "kernels" / "fresh"
    kernel.mkdir(parents=True)
    (directory / "tmp").mkdir()
    ours = pathlib.Path(sys.executable).parent
    environment = {
        "PATH": os.pathsep.join([str(python.parent), str(ours), os.environ["PATH"]]),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": str(CHECKOUT / "tools" / "quick_start"),
        "TMPDIR": str(directory / "tmp"),
        # A blank alone is the name of a file to XLA.
        "XLA_FLAGS": " ".join(
            filter(None, map(os.getenv, ("XLA_FLAGS", "KDPKIT_TESTS_XLA_FLAGS")))
        ),
    }
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "fresh", "env": environment})
    )
    return KernelSpecManager(kernel_dirs=[str(kernel.parent)])


def _end_tensorboards(directory):
    """End the servers that `%tensorboard` has started: they outlive the notebook."""
    for file in (directory / "tmp" / ".tensorboard-info").glob("*.info"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(file.read_text())["pid"], signal.SIGTERM)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("notebook", type=pathlib.Path)
    add("--source", default=CHECKOUT.as_uri(), help="what is installed (default: %(default)s)")
    add("--smoke", action="store_true", help="runs of seconds")
    add("--pictures", type=pathlib.Path, metavar="DIRECTORY")
    add("--output", type=pathlib.Path, metavar="FILE")
    add("--keep", action="store_true", help="what the cells print, in the notebook")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        settings = {"SOURCE": args.source, "STRATEGY": "auto", "SMOKE": args.smoke}
        notebook = run(args.notebook, pathlib.Path(directory), **settings)
    if args.output:
        nbformat.write(notebook, args.output)
    if args.keep:
        keep_prints(args.notebook, notebook)
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures(notebook).items():
            (args.pictures / f"{args.notebook.stem}_{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
