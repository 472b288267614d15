"""Hooks of mkdocs: pages of the site that are not in docs/, and links between them.

The texts in the root of the tree (design.md, CONTRIBUTING.md, ...) become pages, and so does a page
of the API for each public package, which mkdocstrings fills from docstrings. Links to programs are
links to copies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

TEXTS = {
    "README.md": "readme.md",
    "design.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "adapters/megatron_cpu_rehearsal/README.md": "megatron_cpu_rehearsal.md",
}
"""Pages outside of docs/, and their names in the site."""

FIRST = (
    *("fully_shard", "group_modules", "FSDPModule", "register_fsdp_forward_method"),
    *("MixedPrecisionPolicy", "RuntimeOptions", "UnitOptions", "DataParallelMeshDims"),
    "ShardPlacementResult",
)
"""Names of `megatron_fsdp_v2` on its page of the API, in this order: what users call."""

PACKAGES = {
    "megatron_fsdp_v2": "Sharding",
    "megatron_fsdp_v2.checkpoint": "Checkpoints",
    "megatron_fsdp_v2.optim": "Optimizers",
    "megatron_fsdp_v2.diagnostics": "Diagnostics",
    "megatron_fsdp_v2.plan": "Plans",
    "megatron_fsdp_v2_mcore": "Megatron-Core",
    "megatron_cpu_rehearsal": "CPU rehearsal",
}
"""Packages with pages of the API: what their `__all__` lists."""

_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Name the version on every page."""
    text = (ROOT / "megatron_fsdp_v2/__init__.py").read_text()
    found = re.search(r'__version__ = "(.*)"', text)
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the texts of the root, the pages of the API and the files that pages link to."""
    for text, page in TEXTS.items():
        files.append(File.generated(config, page, content=(ROOT / text).read_text()))
    for package, title in PACKAGES.items():
        names = (
            f", members: [{', '.join(FIRST)}], group_by_category: false"
            if title == "Sharding"
            else ""
        )
        content = (
            f"# {title}: `{package}`\n\n::: {package}\n"
            f"    options: {{show_root_heading: false{names}}}\n"
        )
        files.append(File.generated(config, f"api/{package}.md", content=content))
    for name in _linked_files():
        file = File.generated(config, f"files/{_as_text(name)}", abs_src_path=str(ROOT / name))
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to the places that their targets have in the site."""
    where = _source_of(page.file.src_uri)
    return _LINK.sub(lambda link: _in_site(where, link[1]), markdown)


def _source_of(page: str) -> Path:
    """Return the folder that a page's links are relative to."""
    for text, name in TEXTS.items():
        if name == page:
            return (ROOT / text).parent
    return ROOT / "docs"


def _in_site(where: Path, link: str) -> str:
    """Return the link from the site's root, where all pages are, to a file of the tree."""
    target = (where / link).resolve()
    if not target.is_relative_to(ROOT):
        return link
    name = str(target.relative_to(ROOT))
    if name in TEXTS:
        return TEXTS[name]
    if (package := _package(name)) in PACKAGES:
        return f"api/{package}.md"
    return name.removeprefix("docs/") if name.startswith("docs/") else f"files/{_as_text(name)}"


def _as_text(name: str) -> str:
    # A browser shows these files instead of saving them.
    return name if Path(name).suffix in (".txt", ".png", ".svg") else f"{name}.txt"


def _linked_files() -> list[str]:
    """Return the files outside of docs/ that pages link to."""
    pages = [*(ROOT / name for name in TEXTS), *(ROOT / "docs").glob("*.md")]
    found = {
        (page.parent / link).resolve() for page in pages for link in _LINK.findall(page.read_text())
    }
    names = {str(path.relative_to(ROOT)) for path in found if path.is_file()}
    elsewhere = {*TEXTS, *(name for name in names if _package(name) in PACKAGES)}
    return sorted(name for name in names - elsewhere if not name.startswith("docs/"))


def _package(name: str) -> str:
    """Return the package of an `__init__.py`, or an empty string."""
    folder, _, file = name.removeprefix("adapters/").rpartition("/")
    return folder.replace("/", ".") if file == "__init__.py" else ""
