"""mtrain imports and translates without the modules that only Unix has."""

import subprocess
import sys

# Simulates Windows for mtrain's own modules; other libraries ask for the real platform.
WITHOUT_UNIX_MODULES = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "termios", "resource", "pwd", "grp", "tty", "pty", "readline"}:
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").split(".")[0] in {"mtrain", "filelock"}:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in ("fcntl", "termios", "resource", "pwd", "grp", "tty", "pty", "readline"):
    sys.modules.pop(name, None)
"""


TRANSLATE_AND_IMPORT = """
from mtrain import Translator
print(Translator.load(sys.argv[1], "cpu").translate("It rains.")[0].text)
print({"torch._dynamo", "pandas", "datasets"} & sys.modules.keys())

import importlib, pkgutil, mtrain
for module in pkgutil.walk_packages(mtrain.__path__, "mtrain."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("imported")
"""


def test_without_unix_modules_a_model_translates_without_slow_imports_and_every_module_imports(run_dir):
    """Importing PyTorch's compiler or pandas takes longer than everything else that a translation needs."""
    command = [sys.executable, "-c", WITHOUT_UNIX_MODULES + TRANSLATE_AND_IMPORT, str(run_dir)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "Es regnet.\nset()\nimported\n"
