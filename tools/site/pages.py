"""The pages of the site, made from the files of the repository.

A link between files of the repository becomes one between pages. Nothing else of a page changes.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path, PurePosixPath

#: Pages of the repository's root; a link to another one leads to a page with the file's text.
ROOT_PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
)
#: The folder of pages with the texts of files.
FILES = "files"
#: A link, or an image, to a file of the repository.
LINK = re.compile(r"(?P<start>\]\()(?!\w+:|#)(?P<target>[^)#\s]+)(?P<heading>#[^)\s]*)?\)")
#: A block of code, in which nothing is a link.
CODE = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash"}
#: The header of pages that are not searched.
NOT_FOUND = "---\nsearch:\n  exclude: true\n---\n"
#: Names in a table are not divided; a wide table scrolls.
STYLE = ".md-typeset td code { word-break: normal; }\n"
#: Larger files, such as results of benchmarks, are too long for a page.
LONGEST = 200_000

#: The pages of the reference: title and names.
REFERENCE = {
    "engine": (
        "Engine",
        (
            "Engine EngineConfig EngineOptions Blocking Health Stats Histogram KvEventStream BlockStored "
            "BlockRemoved AllBlocksCleared"
        ),
    ),
    "requests": (
        "Requests",
        (
            "SamplingParams SamplingOptions RequestOptions LogitsProcessor Prompt Request Stream "
            "BlockingRequest BlockingStream Batch BatchChunk BatchItem BatchStream BlockingBatch "
            "BlockingBatchStream"
        ),
    ),
    "results": (
        "Results",
        (
            "Result Choice Chunk ToolCall ToolCallDelta Usage Timings Tensor Score Embeddings Ranking "
            "Relevance Reranker"
        ),
    ),
    "errors": (
        "Errors",
        (
            "PenstockError ConfigError ModelLoadError DeviceUnavailableError OutOfMemoryError "
            "RequestError InvalidRequestError OverloadedError DeadlineError GenerationError "
            "EngineStoppedError AdapterLoadError AdapterNotFoundError AdapterConflictError "
            "AdapterLimitError"
        ),
    ),
    "models": (
        "Models and devices",
        (
            "Tokenizer convert describe cuda_info CudaInfo CudaDevice Adapter ModelInfo MemoryInfo "
            "HostTierInfo NumaInfo WeightFormatInfo Host ProfileRow demo"
        ),
    ),
}


def page_of(file: PurePosixPath) -> PurePosixPath:
    """The page of a file or folder of the repository, or the place of an image."""
    if file == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    if file.is_relative_to("docs") and file.suffix in (".md", ".png"):
        page = file.relative_to("docs")
        return page.with_name("index.md") if page.name == "README.md" else page
    if str(file) in ROOT_PAGES:
        return PurePosixPath("project") / file.name.lower()
    page = file if file.suffix == ".md" else file.with_name(f"{file.name}.md")
    return PurePosixPath(FILES, *(part.lstrip(".") for part in page.parts))  # hidden files are no pages


def title_of(file: Path) -> str:
    """The first line of a program's docstring, as a description of its file."""
    if file.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


class Pages:
    """The pages of a repository, as texts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        command = ["git", "-C", str(root), "ls-files"]
        names = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        self._files = [PurePosixPath(name) for name in names.splitlines()]
        self.texts: dict[PurePosixPath, str] = {}
        self.images: dict[PurePosixPath, Path] = {}
        self._waiting: list[PurePosixPath] = []

    def add_all(self) -> None:
        """Add the pages of `docs`, those of the root, and those to which they link."""
        self._waiting = [file for file in self._files if file.is_relative_to("docs") and file.suffix == ".md"]
        self._waiting += [PurePosixPath(name) for name in ROOT_PAGES]
        while self._waiting:
            file = self._waiting.pop()
            if page_of(file) not in self.texts:
                self._add(file)
        for name, (title, names) in REFERENCE.items():
            entries = "\n".join(f"::: penstock.{name}\n" for name in names.split())
            self.texts[PurePosixPath("reference") / f"{name}.md"] = f"# {title}\n\n{entries}"

    def _add(self, file: PurePosixPath) -> None:
        path = self._root / file
        page = page_of(file)
        if page.suffix != ".md":
            self.images[page] = path
        elif path.is_dir():
            self.texts[page] = self._listing(file)
        elif path.suffix == ".md":
            self.texts[page] = self._with_links(file, path.read_text())
        else:
            self.texts[page] = f"{NOT_FOUND}# {file}\n\n{self._code(path)}"

    def _listing(self, folder: PurePosixPath) -> str:
        """A page with the files of a folder."""
        lines = []
        for file in self._files:
            if file.is_relative_to(folder):
                self._waiting.append(file)
                description = title_of(self._root / file)
                link = f"[{file.relative_to(folder)}]({relative(page_of(file), page_of(folder))})"
                lines.append(f"- {link}{': ' if description else ''}{description}")
        return f"{NOT_FOUND}# {folder}\n\n" + "\n".join(lines) + "\n"

    def _code(self, path: Path) -> str:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            text = ""
        if not text or len(text) > LONGEST or "````" in text:
            return "This file is in the repository.\n"
        return f"````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"

    def _with_links(self, file: PurePosixPath, text: str) -> str:
        """The text of a page, with links to pages in place of files."""

        def replaced(match: re.Match[str]) -> str:
            target = PurePosixPath(os.path.normpath(file.parent / match["target"]))
            if not (self._root / target).exists():
                raise SystemExit(f"{file}: {match['target']} does not exist")
            self._waiting.append(target)
            return f"{match['start']}{relative(page_of(target), page_of(file))}{match['heading'] or ''})"

        parts = []
        end = 0
        for code in CODE.finditer(text):
            parts += [LINK.sub(replaced, text[end : code.start()]), code[0]]
            end = code.end()
        return "".join([*parts, LINK.sub(replaced, text[end:])])


def relative(page: PurePosixPath, start: PurePosixPath) -> str:
    return os.path.relpath(page, start.parent)


def write_all(root: Path, folder: Path) -> None:
    """Write the pages of the repository at `root` into a folder."""
    pages = Pages(root)
    pages.add_all()
    for page, text in pages.texts.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)
    for place, image in pages.images.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(image.read_bytes())
    (folder / "site.css").write_text(STYLE)
