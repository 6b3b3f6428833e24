"""Leave a process behind that holds our pipes open, then end."""

import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("left")
