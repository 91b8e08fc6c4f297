"""Starts an op of your own: python examples/templates/new_op.py my_op target_folder

Copies op/ beside this file into target_folder, a new one, and gives everything the name my_op (the
class is MyOp, the compiled module my_op_ext). The copy builds and passes its tests at once: it
computes input * scale. Then change the places that are marked YOUR OP.
"""

import argparse
import importlib.util
import keyword
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent / "op"
BUILT = {"build", "__pycache__", ".pytest_cache", ".ruff_cache"}


def renamed(text: str, name: str) -> str:
    camel = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("template_op", name).replace("TemplateOp", camel)


def new_op(name: str, target: Path) -> list[Path]:
    """Write the files of the op into target, and return them."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"the name must be words like my_op, in lower case, got {name!r}")
    if importlib.util.find_spec(name):
        raise ValueError(f"{name} is a module already, which the new one would hide")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} exists and is not empty")
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        inside = source.relative_to(TEMPLATE)
        if source.is_file() and source.suffix != ".so" and BUILT.isdisjoint(inside.parts):
            copy = target / renamed(str(inside), name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed(source.read_text(), name))
            written.append(copy)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the op, such as my_op")
    parser.add_argument("target", type=Path, help="folder to make")
    args = parser.parse_args()
    try:
        written = new_op(args.name, args.target)
    except ValueError as error:
        sys.exit(f"new_op.py: {error}")
    for file in written:
        print(file)
    print(f"\nNow: cd {args.target}")
    print("     python setup.py build_ext --inplace && python -m pytest -q")
    print('     grep -rn "YOUR OP" .')


if __name__ == "__main__":
    main()
