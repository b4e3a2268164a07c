"""Write the other notebooks from `recipes/colab_gpu.ipynb`, of which some cells differ.

python -m tools.make_notebooks
"""

import copy
import pathlib

import nbformat

RECIPES = pathlib.Path(__file__).parents[1] / "recipes"
SOURCE = RECIPES / "colab_gpu.ipynb"
HOME = "github.com/kdpkit/kdpkit/blob/main/recipes"
COLAB_BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/kdpkit/kdpkit/blob/main/recipes/{name}.ipynb)"
)
KAGGLE_BADGE = (
    "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
    f"(https://kaggle.com/kernels/welcome?src=https://{HOME}/{{name}}.ipynb)"
)
UNTRIED = """\
No TPU was available when this was written: what is below has run on CPUs, and
`kdpkit doctor --tpu` has checked what would fail on a TPU."""
ON_TPU = """\
BERT and a convolutional network, trained over all cores of a TPU by the recipes of kdpkit.
Keras reaches TPUs best through JAX, so this notebook uses JAX."""
TITLES = {
    "colab_tpu": f"""\
# kdpkit on a TPU

{COLAB_BADGE}

{ON_TPU}

**Choose the runtime first:** *Runtime > Change runtime type*, and there a TPU. Then run the cells
from the top.
{UNTRIED}""",
    "kaggle_gpu": f"""\
# kdpkit on Kaggle's two GPUs

{KAGGLE_BADGE}

BERT and a convolutional network, trained on all GPUs of the machine by the recipes of kdpkit.

**Choose the machine first:** *Settings > Accelerator > GPU T4 x2*, and *Settings > Turn on
internet*. Then run the cells from the top. The line that begins with "MirroredStrategy" says how
many GPUs train.""",
    "kaggle_tpu": f"""\
# kdpkit on Kaggle's TPU

{KAGGLE_BADGE}

{ON_TPU}

**Choose the machine first:** *Settings > Accelerator > TPU v5e-8*, and *Settings > Turn on
internet*. Then run the cells from the top.
{UNTRIED}""",
}
FOR_TPU = {
    "02": [('STRATEGY = "auto"', 'STRATEGY = "tpu"')],
    "04": [('"[recipes]"', '"[recipes,jax]"'), ("copy cnn_fit", "copy cnn_jax")],
    "05": [
        (
            "Keras is imported.",
            "Keras is imported.\nThe line that is printed says what JAX found; if it is the CPU, "
            "and why, go back to the choice of the machine.",
        )
    ],
    "06": [
        ('os.environ["KERAS_BACKEND"] = "tensorflow"', 'os.environ["KERAS_BACKEND"] = "jax"'),
        ('os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"\n', ""),
        (
            "from matplotlib import pyplot",
            "from matplotlib import pyplot\n\nfrom kdpkit import sharding\n\n"
            "print(sharding.describe_choice())",
        ),
    ],
    "10": [("cnn_fit", "cnn_jax")],
}


def path_of(name):
    return RECIPES / f"{name}.ipynb"


def notebook(name):
    """Return a notebook as it is to be written."""
    place, kind = name.split("_")
    made = copy.deepcopy(nbformat.read(SOURCE, nbformat.NO_CONVERT))
    made.cells[0].source = TITLES[name].format(name=name)
    if place == "kaggle":  # which shows no TensorBoard
        del made.cells[18:], made.metadata["colab"], made.metadata["accelerator"]
    elif kind == "tpu":
        made.metadata["accelerator"] = "TPU"
    for cell in made.cells:
        number = cell.id.partition("-")[2]
        if cell.cell_type == "code":
            cell.outputs = []  # of the first notebook's run
        cell.id = f"{name.replace('_', '-')}-{number}"
        for old, new in FOR_TPU.get(number, []) if kind == "tpu" else []:
            assert old in cell.source, (name, number)
            cell.source = cell.source.replace(old, new)
    return made


def main():
    for name in TITLES:
        nbformat.write(notebook(name), path_of(name))
        print(path_of(name))


if __name__ == "__main__":
    main()
