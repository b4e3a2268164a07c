"""A TFRecord file truncated between records, or in a header, reads without an error."""

import pathlib
import tempfile

import tensorflow as tf

with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "data.tfrecord")
    with tf.io.TFRecordWriter(str(file)) as writer:
        for _ in range(3):
            writer.write(b"record")
    file.write_bytes(file.read_bytes()[: -len(b"record") - 8])  # in the header of the third
    count = sum(1 for _ in tf.data.TFRecordDataset(str(file)))
    print(f"{count} of 3 records are read, and no error is raised")

raise SystemExit(int(count == 2))
