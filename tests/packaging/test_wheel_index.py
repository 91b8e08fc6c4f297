"""The page of wheels that a release publishes, as pip reads it."""

import functools
import http.server
import runpy
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
page = runpy.run_path(str(ROOT / ".ci" / "wheel_index.py"))["page"]


def make_wheel(folder: Path, local: str) -> str:
    name = f"fused_op-0.2.0+{local}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        info, version = f"fused_op-0.2.0+{local}.dist-info", f"0.2.0+{local}"
        metadata = f"Metadata-Version: 2.1\nName: fused_op\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")
    return name


def test_pip_takes_the_wheel_of_the_version(tmp_path):
    """Catches names and addresses that pip cannot read, as the + of a local version may be."""
    site = tmp_path / "site"
    site.mkdir()
    names = [make_wheel(site, local) for local in ("cputorch2.13", "cu130torch2.14")]
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        (site / "index.html").write_text(page([f"{address}/{name}" for name in names]))
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-index"]
        command += ["--find-links", f"{address}/index.html", "-d", str(tmp_path / "got")]
        subprocess.run([*command, "fused_op==0.2.0+cputorch2.13"], check=True, timeout=120)
        server.shutdown()
    assert [path.name for path in (tmp_path / "got").iterdir()] == names[:1]


def test_files_that_are_no_packages_are_left_out():
    assert "notes" not in page(["https://example.org/v1/notes.txt"])
    line = page(["https://example.org/v1/fused_op-0.2.0%2Bcpu-cp312-x.whl#sha256=12"])
    assert '"https://example.org/v1/fused_op-0.2.0%2Bcpu-cp312-x.whl#sha256=12"' in line
    assert ">fused_op-0.2.0+cpu-cp312-x.whl<" in line
