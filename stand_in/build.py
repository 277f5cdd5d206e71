"""Builds the stand-in's libraries for this interpreter's CUDA build of PyTorch. Needs a C compiler and binutils.

    .venv-cuda/bin/python -m stand_in.build

One library models the card (card/*.c). Each CUDA library that PyTorch needs is generated, with the same name and
symbols: each function jumps to the model, or is a stub that returns 0 (success).
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from stand_in import settings

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "stand_in"  # a folder in it for each state of the sources and of PyTorch
CARD = "libstand_in_card.so"
_PREFIX = "card_"  # of the functions that are modelled
# Libraries whose symbols PyTorch's libraries ask for without a version, by the beginning of a symbol's name.
_BY_PREFIX = {
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "nccl": "libnccl.so.2",
}
_CUDA = ("libcu", "libnv", "libnccl")  # how the names of CUDA's libraries begin


class BuildError(Exception):
    """The stand-in cannot be built here; the text says what is missing."""


def build() -> Path:
    """Returns the folder of the libraries, built if they are missing or outdated. Raises BuildError."""
    asking = _libraries_that_ask()
    sources = sorted((HERE / "card").iterdir())
    made_of = hashlib.sha256("".join(f"{path}{path.stat().st_mtime_ns}" for path in asking).encode())
    for path in (*sources, Path(__file__)):
        made_of.update(path.read_bytes())
    libraries = FOLDER / made_of.hexdigest()[:16]
    if libraries.exists():
        return libraries
    headers = _headers(_cuda_version(asking))
    modelled = set(re.findall(rf"\b{_PREFIX}(\w+)\s*\(", "".join(path.read_text() for path in sources)))
    modelled |= set(re.findall(r"^PRODUCT\((\w+)\)", (HERE / "card" / "kernels.c").read_text(), re.M))
    # A folder is renamed when it is complete: other processes may build meanwhile, and a build may be interrupted.
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="part-") as name:
        part = Path(name) / "libraries"
        part.mkdir()
        code = [path for path in sources if path.suffix == ".c"]
        _compile(part / CARD, code, "-fvisibility=hidden", "-I", str(headers))
        for library, symbols in _asked_for(asking, headers, modelled).items():
            _make_library(part, library, symbols, modelled)
        _note_architectures(part)
        try:
            part.rename(libraries)
        except OSError:
            if not libraries.exists():  # else another process was first, with the same
                raise
    return libraries


def _libraries_that_ask() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec else None
    if folder is None or not (folder / "libtorch_cuda.so").exists():
        raise BuildError(
            f"{sys.executable} has no CUDA build of PyTorch. make stand-in makes .venv-cuda, which has one unless pip "
            "offers nothing but a CPU build for this machine and version (another: make stand-in TORCH_CUDA=2.12.1)"
        )
    found = [path for path in folder.glob("lib*.so") if re.match(r"lib(torch|c10|caffe2)", path.name)]
    bitsandbytes = importlib.util.find_spec("bitsandbytes")
    if bitsandbytes:
        found += Path(bitsandbytes.origin).parent.glob(f"libbitsandbytes_cuda{_cuda_version(found)}*.so")
    return sorted(found)


def _cuda_version(libraries: list[Path]) -> str:
    library = next(path for path in libraries if path.name == "libtorch_cuda.so")
    return re.search(r"libcudart\.so\.(\d+)", _output("readelf", "-d", library))[1]


def _headers(cuda: str) -> Path:
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "include" if triton else None
    if folder is None or not (folder / "cuda_runtime_api.h").exists():
        raise BuildError("the headers of CUDA come with Triton, which is not installed: pip install triton")
    found = re.search(r"#define CUDA_VERSION (\d+)\d{3}", (folder / "cuda.h").read_text())[1]
    # In another major version of CUDA, structures have other sizes.
    if found != cuda:
        raise BuildError(f"Triton's headers are of CUDA {found}, and PyTorch is built for {cuda}: take another Triton")
    return folder


def _asked_for(asking: list[Path], headers: Path, modelled: set[str]) -> dict[str, dict[str, str]]:
    """Returns {CUDA library: {symbol that it must have: version, or ""}}. `asking`: libraries that use the symbols.
    `headers`: CUDA's, which name the driver's functions. `modelled`: functions of the card's model."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in asking:
        for library in re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", path)):
            if library.startswith(_CUDA):
                found[library]  # also one of which nothing is asked by name
        library_of = {}  # by version of a symbol
        library = ""
        for line in _output("readelf", "-V", path).splitlines():
            if file := re.search(r"File: (\S+)", line):
                library = file[1]
            elif version := re.search(r"Name: (\S+)", line):
                library_of[version[1]] = library
        for line in _output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            library = library_of.get(version) if version else _by_prefix(symbol)
            if library and library.startswith(_CUDA):
                found[library][symbol] = version
    # A program's own libraries may ask the runtime for what PyTorch's do not.
    runtime = next(library for library in found if library.startswith("libcudart.so"))
    version = next(iter(found[runtime].values()))
    found[runtime] |= {name: version for name in modelled if re.match("cuda[A-Z]", name)}
    # The driver and NVML are not linked with but opened: the one may be asked for anything that its header names.
    driver = _output("cc", "-E", "-I", headers, "-x", "c", headers / "cuda.h")
    found["libcuda.so.1"] |= dict.fromkeys(re.findall(r"\b(cu[A-Z]\w+)\s*\(", driver), "")
    found["libnvidia-ml.so.1"] |= dict.fromkeys((name for name in modelled if name.startswith("nvml")), "")
    return found


def _by_prefix(symbol: str) -> str | None:
    return next((library for prefix, library in _BY_PREFIX.items() if symbol.startswith(prefix)), None)


def _make_library(folder: Path, library: str, symbols: dict[str, str], modelled: set[str]) -> None:
    lines = ["void card_not_modelled(const char *);", "void *card_new_handle(void);"]
    for symbol in sorted(symbols):
        plain = re.sub(r"_v\d+$", "", symbol) if library == "libcuda.so.1" else symbol
        ours = next((name for name in (symbol, plain) if name in modelled), None)
        if ours:  # a jump keeps the arguments as they are, whatever they are
            jump = f".globl {symbol}\\n.type {symbol},@function\\n{symbol}: jmp {_PREFIX}{ours}@PLT\\n"
            lines.append(f'__asm__("{jump}");')
            continue
        say = f'static char said; if (!said) {{ said = 1; card_not_modelled("{symbol}"); }}'
        if "Create" in symbol and not symbol.startswith("cudaGraph"):
            lines.append(f"int {symbol}(void **made) {{ {say} *made = card_new_handle(); return 0; }}")
        else:
            lines.append(f"int {symbol}(void) {{ {say} return 0; }}")
    source = folder / "stubs.c"
    source.write_text("\n".join(lines) + "\n")
    options = [f"-Wl,-soname,{library}", "-L", str(folder), "-lstand_in_card", "-Wl,-rpath,$ORIGIN"]
    versions = defaultdict(list)
    for symbol, version in symbols.items():
        versions[version].append(symbol)
    script = "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in sorted(versions.items()) if v)
    if script:
        (folder / "stubs.map").write_text(script)
        options.append(f"-Wl,--version-script={folder / 'stubs.map'}")
    _compile(folder / library, [source], *options)


def architectures(libraries: Path) -> list[int]:
    """Returns the compute capabilities of this PyTorch's kernels, as noted in the folder `libraries`: 86 for 8.6."""
    return [int(name) for name in (libraries / "architectures").read_text().split()]


def _note_architectures(folder: Path) -> None:
    environment = settings.environment("rtx3060", libraries=folder, architectures=[86])
    program = "import torch; print(*(name[3:].rstrip('af') for name in torch._C._cuda_getArchFlags().split()))"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"PyTorch cannot be imported on the stand-in: {result.stderr[-2000:]}")
    found = sorted({int(number) for number in result.stdout.split() if number.isdecimal()})
    (folder / "architectures").write_text(" ".join(map(str, found)))


def _compile(library: Path, sources: list[Path], *options: str) -> None:
    flags = ["-O1", "-g", "-w", "-shared", "-fPIC", "-D_GNU_SOURCE"]
    _output("cc", *flags, "-o", library, *sources, *options, "-ldl", "-lpthread")


def _output(program: str, *arguments: str | Path) -> str:
    try:
        result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        raise BuildError(f"{program} is not installed; the stand-in needs a C compiler and binutils") from None
    if result.returncode:
        raise BuildError(f"{program} {' '.join(map(str, arguments))}\n{result.stderr}")
    return result.stdout


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(f"stand_in.build: {error}")
