"""Keras' `assign_add` reads, then assigns, so concurrent updates are lost."""

import threading

import keras

iterations = keras.optimizers.SGD().iterations


def update():
    for _ in range(2000):
        iterations.assign_add(1)


threads = [threading.Thread(target=update) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("counted", int(iterations), "of 8000 updates")

raise SystemExit(int(int(iterations) != 8000))
