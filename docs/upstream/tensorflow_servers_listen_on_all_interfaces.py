"""A server at localhost answers at every address of its machine. Run: python FILE"""

import os
import socket
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import tensorflow as tf

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]}, "worker", 0)
try:
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
except OSError:
    print("It only answers at its own address.")
    code = 0
else:
    print(f"A server at 127.0.0.1:{port} answers at 127.0.0.2:{port}.")
    code = 1
sys.stdout.flush()
os._exit(code)  # the server would wait
