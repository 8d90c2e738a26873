"""JupyterLab in a headless Chromium, as a learner has it: open a notebook, run it, move its widgets.

The server listens on loopback with a random token and port, serves a copy of the notebooks, and keeps its settings
in a folder of its own, so nothing of the user's is read or changed. No page outside is asked for anything.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

CHROMIUM_ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--no-first-run"),
]
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells off the screen exist in the page too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
WIDGETS = ".widget-text input, .widget-dropdown select, .widget-select select, .widget-slider .noUi-handle, " + (
    ".widget-checkbox input, .jupyter-widgets.widget-toggle-button, .widget-toggle-buttons"
)
START_S, RUN_S, MOVE_S = 60, 120, 60


def find_chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def serving(folder, home):
    """JupyterLab over `folder`; yields its address with the token in it. `home` takes settings and the log."""
    for name, values in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    own = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    own |= {"JUPYTER_PREFER_ENV_PATH": "1", "HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}"]
    with open(home / "lab.log", "wb") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield address(server, home)
        finally:
            server.terminate()  # it ends its kernels on the way out
            try:
                server.wait(timeout=START_S)
            except subprocess.TimeoutExpired:
                server.kill()


def address(server, home):
    """`http://127.0.0.1:PORT/lab{page}?token=TOKEN` of a server that has just been started."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        for file in (home / "runtime").glob("jpserver-*.json"):
            try:
                info = json.loads(file.read_text(encoding="utf-8"))
            except json.JSONDecodeError:  # being written
                continue
            return f"{info['url']}lab{{page}}?token={info['token']}"
        time.sleep(0.1)
    raise AssertionError("JupyterLab did not start:\n" + (home / "lab.log").read_text(encoding="utf-8"))


class Notebook:
    """One open notebook. Commands go to Lab itself; what a learner touches is touched in the page."""

    def __init__(self, page, address, path):
        self.page = page
        page.goto(address.format(page=f"/tree/{path}") + "&reset")
        page.wait_for_function(
            "path => window.jupyterapp?.shell.currentWidget?.context?.path === path"
            " && window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'",
            arg=path,
            timeout=1000 * START_S,
        )

    def command(self, name, **arguments):
        return self.page.evaluate("([n, a]) => window.jupyterapp.commands.execute(n, a)", [name, arguments])

    def run_all(self):
        """Run every cell, wait, and raise AssertionError for a cell that did not run or ended in an error."""
        self.page.set_default_timeout(1000 * RUN_S)
        self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        cells = self.page.evaluate(
            "window.jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(c => c.cell_type === 'code')"
        )
        for cell in cells:
            errors = [o for o in cell["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
            assert cell["execution_count"] and not errors, f"{''.join(cell['source'])[:200]}\n{errors}"

    def widgets(self):
        """Every control that a learner can move, in the order of the page."""
        self.page.wait_for_timeout(500)  # views of widgets are made a moment after their cell has run
        return self.page.locator(f".jp-Notebook :is({WIDGETS})").all()

    def theme(self, name):
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


def move(control, turn):
    """Do with a control what a learner does. Odd and even turns lead to different values."""
    kind = control.evaluate("e => e.tagName === 'SELECT' ? 'select' : e.className + ' ' + (e.type || '')")
    if kind == "select":
        count, now = control.evaluate("e => [e.options.length, e.selectedIndex]")
        control.select_option(index=(now + 1) % count)
    elif "noUi-handle" in kind:
        low, high, now = (float(control.get_attribute(f"aria-value{name}")) for name in ("min", "max", "now"))
        control.press("ArrowLeft" if now > (low + high) / 2 else "ArrowRight")
    elif "toggle-buttons" in kind:
        control.locator("button:not(.mod-active)").first.click()
    elif "text" in kind:
        control.fill(("Ada read the book because it was late.", "The tea was cold, and it was late.")[turn % 2])
        control.press("Enter")
    else:
        control.click()


def pictures(control):
    """The addresses of all pictures in the cell that holds this control."""
    return control.evaluate("e => [...e.closest('.jp-Cell').querySelectorAll('img')].map(i => i.src)")


def move_and_watch(control, turn):
    """Move a control. Raises AssertionError unless the pictures of its cell change, and one stands there."""
    before = pictures(control)
    move(control, turn)
    deadline = time.monotonic() + MOVE_S
    while time.monotonic() < deadline:
        after = pictures(control)
        if after and after != before:
            return
        control.page.wait_for_timeout(200)
    name = control.evaluate("e => e.closest('.jupyter-widgets').innerText || e.closest('.jupyter-widgets').className")
    raise AssertionError(f"moving the widget {name!r} changed no picture within {MOVE_S} s")
