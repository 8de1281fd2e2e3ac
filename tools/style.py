"""Check the English of docstrings, messages and pages, and count how complete the reference is.

Run as ``python tools/style.py`` (a part of ``make lint``): prints one line per fault and ends with an error if there is
one. ``python tools/style.py --count`` prints the shares that the faults come from, ``python tools/style.py PATH ...``
looks at some files or folders alone. The rules are those of ``docs/development/writing.md``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
REFERENCE = ROOT / "docs" / "api"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module

_VERBS = """
Accumulate Adapt Add Adjust Align Allow Append Apply Approximate Ask Assemble Assign Attach Average Bind Bound Bring
Build Cache Call Cancel Cast Center Change Check Choose Classify Clear Close Collect Combine Compare Compile Complete
Compute Concatenate Conclude Configure Confirm Connect Contract Convert Copy Correct Corrupt Count Cover Create Cut
Deal Decide Decode Decompose Decorate Decrease Define Delete Describe Detach Detect Determine Diagnose Differentiate
Disable Disarm Discard Display Divide Do Download Draw Drop Dump Embed Enable Encode End Ensure Enter Enumerate Escape
Estimate Evaluate Evict Exclude Execute Exit Expand Explain Export Extend Extract Factor Fetch Fill Filter Find Finish
Fit Flatten Flip Fold Follow Forget Format Freeze Gather Generate Get Give Go Group Guard Guess Halve Handle Hash Hide
Hold Identify Ignore Import Include Increase Index Infer Initialize Insert Install Integrate Interpolate Interpret
Invert Iterate Join Keep Label Launch Lay Learn Leave Let Limit Line Link List Listen Load Locate Lock Log Look Loosen
Lower Make Map Mark Mask Match Measure Merge Minimize Mirror Modify Monitor Mount Move Multiply Name Narrow Normalize
Notify Number Observe Offer Omit Open Optimize Order Orthogonalize Override Pad Pair Parse Pass Perform Permute Pick
Place Plan Plot Point Pop Postpone Predict Prepare Preserve Prevent Price Print Probe Process Produce Project Provide
Prune Pull Push Put Query Quote Raise Rank Read Rebuild Recognize Recompute Record Redact Reduce Refer Refit Refuse
Register Reject Release Reload Remember Remove Rename Render Reopen Repeat Replace Report Represent Require Rescale
Reset Reshape Resolve Restore Restrict Resume Retrieve Return Reuse Reverse Rewrite Rotate Round Run Sample Save Scale
Scan Schedule Score Search Select Send Separate Serve Set Share Shift Show Shrink Shuffle Sign Simplify Simulate Skip
Solve Sort Split Square Stack Standardize Start Step Stop Store Stream Strip Subtract Suggest Sum Summarize Suppress
Switch Symmetrize Synchronize Take Terminate Test Time Trace Track Train Transform Translate Transpose Traverse Treat
Trim Truncate Try Turn Undo Unfold Unlock Unpack Unregister Unwrap Update Use Validate Verify View Visit Wait Walk
Warn Watch Weight Whiten Widen Wrap Write Yield Zero
"""
VERBS = frozenset(_VERBS.split())
"""First words of summaries of functions."""

_LITTLE = (
    "of|for|to|in|on|at|by|as|is|was|are|with|without|from|than|into|over|under|per|or|and|but|not|after|before|between|"
    "if|where|when|that|which|has|have|had|had|gives|give|gets|get|makes|make|takes|take|needs|need|called|named|like|"
    "such|half|become|becomes|within|beyond|beside|along|through|across|until|via|plus|minus|times|given|means|be|"
    "being|only|also|just|itself|too|then|whose|while|because|once|both|either|so|holding|see|sees|returns|return"
)
_UNITS = (
    "row|line|job|pass|column|test|layer|seed|step|batch|sample|matrix|point|measurement|process|file|page|class|output|"
    "number|figure|key|value|module|name|word|call|iteration|epoch|training|run|entry|panel|figure|core|size|set|table"
)
PHRASES: tuple[tuple[str, str], ...] = (
    (rf"\ban? (?!(?:{_LITTLE})\b)[a-z_]+ an? (?!(?:few|lot|little|bit)\b)[a-z_]+", 'write "per" instead of "a X a Y"'),
    (
        rf"\b(?:\d+|one|two|three|four|five|ten|some|each|many|few|[a-z]+s) (?:{_UNITS})s? an? (?:{_UNITS})\b",
        'write "per" instead of "a X a Y"',
    ),
    (r"\b(?:nobody|somebody|whoever|whomever)\b", "name the actor"),
    (
        r"(?<!there )\bis no (?!(?:longer|more|less|faster|slower|better|worse|larger)\b)[a-z]+",
        'say what is allowed instead of "is no X"',
    ),
    (r"(?<!paper )(?<!papers )(?<!that )\b(?:was|were|is|are|been|be) told\b", "name what was passed or configured"),
    (r"(?<!paper )(?<!caption )\btells? (?!apart)[a-z]+", 'use "show", "indicate" or "log" for "tell"'),
    (r"\bsee there\b", "repeat the description where it is needed"),
    (r"\b(?:FORMULAS|DESIGN|LAYOUT|STYLE|EXPERIMENTS)(?:\.md)?\b", "refer to documents of the repository only"),
)
BRITISH = re.compile(
    r"(?<![A-Za-z])(?<!--)(?:de|un|non|re|pre|mis)?(?:centr(?:e|ed|es|ing)|normalis\w+|initialis\w+|optimis(?!t|m)\w+|colour\w*|"
    r"learnt|behaviour\w*|favour\w*|neighbour\w*|parametris\w+|vectoris\w+|standardis\w+|regularis\w+|symmetris\w+|"
    r"generalis\w+|summaris\w+|visualis\w+|labelled|labelling|modelled|modelling|analys(?:e|ed|es|ing)|licence|grey|"
    r"recognis\w+|organis\w+|minimis\w+|maximis\w+|factoris\w+|linearis\w+|randomis\w+|discretis\w+|honour\w*)(?![A-Za-z])",
    re.IGNORECASE,
)
WH = re.compile(r"^(?:What|Whether|How|Who|Which|Where|When|Why|Whose)\b")


@dataclass(frozen=True)
class Fault:
    """A place, and what to do about it."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.text}"


def functions_of(tree: ast.AST, parent: str = "") -> Iterator[tuple[str, Documented]]:
    """Yield functions and classes with their dotted names, those inside of functions left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{parent}{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from functions_of(node, f"{name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from functions_of(node, parent)


def decorators_of(node: Documented) -> set[str]:
    """Return the last parts of the names of a function's or class's decorators."""
    names = set()
    for decorator in getattr(node, "decorator_list", []):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def is_property(node: Documented) -> bool:
    """Return whether a function is read as an attribute."""
    return bool(decorators_of(node) & {"property", "cached_property", "setter", "fixture"})


def is_overload(node: Documented) -> bool:
    """Return whether a function is a signature for type checkers only."""
    return "overload" in decorators_of(node)


def summary_of(node: Documented) -> str:
    """Return the first line of a docstring, or nothing."""
    return (ast.get_docstring(node) or "").split("\n")[0]


def starts_with_verb(summary: str) -> bool:
    """Return whether a summary starts with a verb in the imperative."""
    return re.split(r"[\s,.:;]", summary, maxsplit=1)[0] in VERBS


def summaries(file: Path, tree: ast.Module) -> Iterator[Fault]:
    """Find summaries that start otherwise than with a verb (functions) or are wh-clauses."""
    for name, node in [("module", tree), *functions_of(tree)]:
        summary, line = summary_of(node), getattr(node, "lineno", 1)
        if WH.match(summary):
            yield Fault(file, line, f"{name}: the summary is a wh-clause: {summary!r}")
        elif isinstance(node, Function) and summary and not is_property(node) and not starts_with_verb(summary):
            yield Fault(file, line, f"{name}: the summary does not start with a verb: {summary!r}")


def described(docstring: str, sections: Iterable[str]) -> dict[str, str]:
    """Return the descriptions of arguments or attributes in a Google docstring, by name."""
    result: dict[str, str] = {}
    inside, name, indent = False, "", 0
    for line in docstring.split("\n"):
        if line.strip().rstrip(":") in sections and line.strip().endswith(":") and not line.startswith(" "):
            inside, indent = True, 0
        elif inside and line and not line.startswith(" "):
            inside = False
        elif inside and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            match = re.match(r"\s+([*`\w, ]+?)(?:\s*\([^)]*\))?:\s+(.*)$", line) if depth == indent else None
            if match:
                name = match[1]
                for each in re.split(r",\s*", name):
                    result[each.strip("*` ")] = match[2]
            elif name:
                for each in re.split(r",\s*", name):
                    result[each.strip("*` ")] += " " + line.strip()
    return result


def parameters_of(node: Function, method: bool) -> list[str]:
    """Return the names of a function's arguments, without self or cls."""
    spec = node.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    if method and names and "staticmethod" not in decorators_of(node):
        names = names[1:]
    names += [a.arg for a in spec.kwonlyargs]
    names += [a.arg for a in (spec.vararg, spec.kwarg) if a is not None]
    return [name for name in names if not name.startswith("_")]


def missing_arguments(node: Documented, method: bool) -> list[str]:
    """Return the arguments that a docstring does not describe; those of a class are those of its constructor."""
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        found = described(docstring, ("Args", "Attributes"))
        constructor = next((n for n in node.body if isinstance(n, Function) and n.name == "__init__"), None)
        if constructor is not None:
            wanted = parameters_of(constructor, True)
            found |= described(ast.get_docstring(constructor) or "", ("Args",))
        elif "dataclass" in decorators_of(node) or any(getattr(b, "id", "") == "NamedTuple" for b in node.bases):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            wanted = [n.target.id for n in fields if not n.target.id.startswith("_")]  # type: ignore[union-attr]
        else:
            wanted = []
    else:
        assert isinstance(node, Function)
        if is_property(node) or node.name.startswith("_"):
            return []
        found = described(docstring, ("Args",))
        wanted = parameters_of(node, method)
    return [name for name in wanted if not found.get(name, "").strip()]


def returns_something(node: Function) -> bool:
    """Return whether a function is annotated to return a value that a Returns or Yields section should describe."""
    returns = node.returns
    nothing = returns is None or (isinstance(returns, ast.Constant) and returns.value is None)
    return (
        not nothing
        and not is_property(node)
        and ast.unparse(returns) not in ("NoReturn", "Self", "Never", "Iterator[None]")
    )  # type: ignore[arg-type]


def reference() -> dict[str, Path]:
    """Return the names that the pages of the reference show, with the pages."""
    return {
        name: page
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)
    }


def find_definition(name: str, trees: dict[str, tuple[Path, ast.Module]]) -> tuple[Path, Documented] | None:
    """Follow a public name through the packages that import it to its definition."""
    module, _, attribute = name.rpartition(".")
    for _ in range(10):
        if module not in trees:
            return None
        file, tree = trees[module]
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, Function | ast.ClassDef) and node.name == attribute and not is_overload(node):
                return file, node
        target = _imported_from(tree, attribute, module, trees)
        if target is None:
            return None
        module, attribute = target
    return None


def _imported_from(
    tree: ast.Module, attribute: str, module: str, trees: dict[str, tuple[Path, ast.Module]]
) -> tuple[str, str] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return node.module, alias.name
        if isinstance(node, ast.Dict):  # a table of names that are imported when they are used
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and key.value == attribute:
                    full = str(value.value)
                    return (full if full.startswith("featlearn") else f"{module}.{full.lstrip('.')}"), attribute
    # Tables of "module: names" are rare enough to look through all modules of the package.
    for other, (_, candidate) in trees.items():
        if other.startswith(module + ".") and any(
            isinstance(n, Function | ast.ClassDef) and n.name == attribute for n in candidate.body
        ):
            return other, attribute
    return None


def all_trees() -> dict[str, tuple[Path, ast.Module]]:
    """Parse every module of the library."""
    trees = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = (file, ast.parse(file.read_text(encoding="utf-8")))
    return trees


def reference_faults(trees: dict[str, tuple[Path, ast.Module]]) -> Iterator[tuple[Path, Documented, list[str]]]:
    """Yield every function, class and public method of the reference with what its docstring lacks."""
    seen = set()
    for name in reference():
        found = find_definition(name, trees)
        if found is None:
            continue  # a constant, which has a comment and no docstring
        file, node = found
        if (file, node.lineno) in seen:
            continue
        seen.add((file, node.lineno))
        members: list[tuple[Documented, bool]] = [(node, False)]
        if isinstance(node, ast.ClassDef):
            members += [(n, True) for n in node.body if isinstance(n, Function) and not n.name.startswith("_")]
        for member, method in members:
            yield file, member, missing_in(member, method)


def missing_in(node: Documented, method: bool = False) -> list[str]:
    """Return what the docstring of a function or class of the reference lacks."""
    docstring = ast.get_docstring(node) or ""
    if not docstring:
        return ["a docstring"]
    lacking = [f"argument {name}" for name in missing_arguments(node, method)]
    if isinstance(node, Function) and returns_something(node):
        first = docstring.split("\n")[0].split(" ")[0].rstrip(".")
        if not re.search(r"^(Returns|Yields):", docstring, re.M) and first not in ("Return", "Yield", "Iterate"):
            lacking.append("Returns")
    return lacking


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a Python file, or the paragraphs of another one, with their lines."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, re.sub(r"\s+", " ", node.value)
        for number, line in enumerate(text.split("\n"), 1):
            if match := re.search(r"(?:^|\s)#\s(.*)$", line):
                yield number, match[1]
    else:
        number = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            yield number, re.sub(r"\s+", " ", paragraph)
            number += paragraph.count("\n")


def phrases(file: Path) -> Iterator[Fault]:
    """Find phrases and spellings that the rules exclude."""
    for line, text in texts_of(file):
        for pattern, advice in PHRASES:
            for match in re.finditer(pattern, text):
                yield Fault(file, line, f"{advice}: {match[0]!r}")
        for match in BRITISH.finditer(text):
            yield Fault(file, line, f"write it the American way: {match[0]!r}")


def names(file: Path, tree: ast.Module) -> Iterator[Fault]:
    """Find British spelling in names of functions, classes, arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):  # names of others, and old names of arguments
            continue
        name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
        if isinstance(name, str) and BRITISH.search(name.replace("_", " ")):
            yield Fault(file, getattr(node, "lineno", 1), f"write the name the American way: {name!r}")


def check(paths: Iterable[Path]) -> list[Fault]:
    """Return the faults of the files at or below some paths, one per place and text."""
    files = [f for p in paths for f in (sorted(p.rglob("*")) if p.is_dir() else [p]) if f.suffix in (".py", ".md")]
    files = [f for f in files if f != Path(__file__).resolve() and "reproductions" not in f.parts]
    result: list[Fault] = []
    for file in files:
        result += phrases(file)
        if file.suffix == ".py" and SOURCE in file.parents:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            result += [*summaries(file, tree), *names(file, tree)]
    chosen = set(files)
    for file, node, lacking in reference_faults(all_trees()):
        if lacking and file in chosen:
            result.append(Fault(file, node.lineno, f"{node.name} lacks {', '.join(lacking)}"))  # type: ignore[union-attr]
    return sorted(set(result), key=lambda fault: (str(fault.file), fault.line, fault.text))


def count() -> None:
    """Print the shares of verb-first summaries and complete docstrings, and the number of phrases."""
    trees = all_trees()
    functions = [
        node
        for _, tree in trees.values()
        for _, node in functions_of(tree)
        if isinstance(node, Function) and ast.get_docstring(node) and not is_property(node)
    ]
    verbs = sum(starts_with_verb(summary_of(node)) for node in functions)
    entries = list(reference_faults(trees))
    complete = sum(not lacking for _, _, lacking in entries)
    spoken = [fault for file, _ in trees.values() for fault in phrases(file)]
    linked = [
        file for file, tree in trees.values() if re.search(r"https://(arxiv|openreview)", ast.get_docstring(tree) or "")
    ]
    print(f"verb-first summaries of functions   {verbs} of {len(functions)} ({verbs / len(functions):.0%})")
    print(f"complete docstrings of reference    {complete} of {len(entries)} ({complete / len(entries):.0%})")
    print(f"phrases and spellings in src        {len(spoken)}")
    print(f"modules with a link to a paper      {len(linked)}")


def main() -> None:
    """Check the whole project, or the paths that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders to look at; default: all")
    parser.add_argument("--count", action="store_true", help="print shares instead of faults")
    arguments = parser.parse_args()
    if arguments.count:
        return count()
    default = [ROOT / name for name in ("src", "docs", "tools", "README.md", "CONTRIBUTING.md", "SECURITY.md")]
    faults = check([path.resolve() for path in arguments.paths] or default)
    for fault in faults:
        print(fault)
    if faults:
        sys.exit(f"{len(faults)} faults; the rules are in docs/development/writing.md")


if __name__ == "__main__":
    main()
