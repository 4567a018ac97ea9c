"""Hook of mkdocs: rule pages of plugins stand beside the others, each page says the version, and a built page loads
nothing from another host."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from engine import __version__

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```\w+) ([\w./-]+)$", re.MULTILINE)  # a file's name, as rule pages write it
LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+|@import[^;]*//[^;]+"""
)
CSS_LOADED = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^"')\s]+""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The foot of each page has the version."""
    config.copyright = f"{config.site_name} {__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the rule pages of plugins."""
    for page in sorted((ROOT / "engine/plugins").glob("*/pages/*.md")):
        text = page.read_text(encoding="utf-8").replace("](../../../../docs/", "](../")
        files.append(File.generated(config, f"rules/{page.name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to rule pages of plugins lead to their pages here; links to code become its path; files have their names."""
    folder = Path(config.docs_dir) / PurePosixPath(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups()
        target = (folder / path).resolve()
        if target.is_relative_to(config.docs_dir):
            return link[0]
        if target.parent.name == "pages":
            up = "../" * page.file.src_uri.count("/")
            return f"{image}[{text}]({up}rules/{target.name}{anchor or ''})"
        return f"{text} (`{target.relative_to(ROOT)}`)" if target.is_relative_to(ROOT) else link[0]

    titled = FENCE.sub(r'\1 title="\2"', markdown)
    return LINK.sub(moved, titled)


def on_post_build(config: MkDocsConfig) -> None:
    """A page that loads something from another host ends the build."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        pattern = {".html": LOADED, ".css": CSS_LOADED}.get(file.suffix)
        loaded = pattern.findall(file.read_text(encoding="utf-8")) if pattern else []
        loaded = [address for address in loaded if 'rel="canonical"' not in address]
        if loaded:
            raise PluginError(f"{file} loads from another host: {loaded[:3]}")
