"""`TrainingLoop`: a training loop to override in one place, on one device or many replicas."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from kdpkit._internal import checks, versions
from kdpkit.training import _callbacks
from kdpkit.training._feed import Feed
from kdpkit.training._objective import Objective
from kdpkit.training._steps import Steps

_STEPS = {
    "tensorflow": ("kdpkit.training.tensorflow._strategies", "steps_of"),
    "jax": ("kdpkit.training.jax._loop", "JaxSteps"),
}


def _guarded(method: Callable) -> Callable:
    """Run a method so that an error caused by another process explains that."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **settings: Any) -> Any:
        with self._steps.guard():
            return method(self, *args, **settings)

    return guarded


class TrainingLoop:
    """Train a Keras model on several devices with a step of your own, as on one device.

    Override `per_example_loss` to change what a step computes. The loop does the rest as Keras'
    `fit` does: means over all examples of a batch, whichever device had them, one update of the
    optimizer for each batch, metrics, callbacks, `History` and the progress bar. On TensorFlow only
    layers are divided over the devices, as by `replica_exact`.

    The loop compiles the model with these arguments, so `model.save` keeps the optimizer's state.
    Continue with a loaded model by `TrainingLoop(model, optimizer=model.optimizer, loss=...)`.
    Freeze layers before the loop first trains.

    What is exact, and what a loss may depend on: docs/explanation/what_stays_exact.md. Several
    processes: docs/how_to/several_processes.md. With `ParameterServerStrategy` each worker makes
    its own steps, without waiting for the others: docs/how_to/parameter_servers.md.

    Args:
        model: A Keras model, built inside `with strategy.scope():` if there is a strategy.
        optimizer: As in `compile`. In `mixed_float16` Keras wraps it in a `LossScaleOptimizer`.
        loss: As in `compile`, with its reduction over the complete batch; `reduction=None` means
            the mean. Leave it out if your `per_example_loss` does not use it.
        metrics: As in `compile`.
        strategy: The devices: on TensorFlow a strategy, as of `kdpkit.strategies.select_strategy`;
            on JAX a `kdpkit.sharding.DataParallel`, a `ModelParallel` or a mesh. None takes the
            strategy that the model was built in, or the distribution that is set in Keras.
        steps_per_loop: Training steps for each call of the compiled function, as Keras'
            `steps_per_execution`. Callbacks see the last step of each call.
        accumulation: Micro-batches that each batch is split into, to need less memory. The
            optimizer still makes one update for each batch, the same one. On TensorFlow `fit`
            raises if a loss or a layer compares examples with each other.
        jit_compile: Whether XLA compiles the training step: on JAX all of it, on TensorFlow the
            forward pass, backward pass and update, on several devices the calls of divided layers.
            `"auto"` is the rule of Keras' `compile`: XLA on JAX, and on TensorFlow where the
            machine has a GPU and the model was built outside any strategy. XLA compiles every new
            shape of a batch again.
        loss_weights: As in `compile`.
        weighted_metrics: As in `compile`; `metrics` do not see sample weights.
        batch_norm: As in `replica_exact`; with `accumulation` it normalizes each micro-batch.
        remat: Whether the backward pass computes the activations inside of blocks again, which
            saves the memory to keep them. Blocks are the layers that contain layers, such as those
            of a transformer. Weights and losses stay the same: docs/how_to/shard_variables.md.

    Raises:
        ValueError: A count that is not positive; no loss; a model with a `train_step` or
            `compute_loss` of its own but no `per_example_loss` in the loop; a model or an
            optimizer that was built outside the strategy's scope.

    >>> import tensorflow as tf
    >>> from kdpkit import strategies, testing
    >>> data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(10)).batch(4)
    >>> strategy = strategies.select_strategy("mirrored", devices=2)
    >>> with strategy.scope():
    ...     model = testing.tiny_classifier()
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> loop = TrainingLoop(model, optimizer="adam", loss=loss, steps_per_loop=3)
    >>> history = loop.fit(data, epochs=2, verbose=0)
    >>> len(history.history["loss"]), loop.predict(data, verbose=0).shape
    (2, (10, 3))
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: str | keras.optimizers.Optimizer,
        loss: str | Callable | Sequence | Mapping | None = None,
        metrics: Sequence | Mapping = (),
        strategy: Any = None,
        steps_per_loop: int = 1,
        accumulation: int = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        loss_weights: Sequence[float] | Mapping[str, float] | None = None,
        weighted_metrics: Sequence | Mapping = (),
        batch_norm: str = "global",
        remat: bool = False,
    ) -> None:
        if not isinstance(model, keras.Model):
            checks.fail("`model` must be a Keras model.", model=model)
        has_own_loss = type(self).per_example_loss is not TrainingLoop.per_example_loss
        for name in ("train_step", "test_step", "compute_loss"):
            if not has_own_loss and getattr(type(model), name) is not getattr(keras.Model, name):
                checks.fail(
                    f"The model has a `{name}` of its own, which the loop would not call. Write "
                    "what it computes as `per_example_loss` of a subclass of `TrainingLoop`, or "
                    "train with `replica_exact(model)` and `fit`.",
                    model=type(model).__name__,
                )
        if loss is None and not has_own_loss:
            checks.fail(
                "There is no loss to train with.",
                loss=loss,
                remedy="Pass `loss` as to `compile`, or override `per_example_loss`.",
            )
        self.model = model
        if optimizer is None:
            checks.fail("There is no optimizer to train with.", optimizer=optimizer)
        checks.one_of("jit_compile", jit_compile, ("auto", True, False))
        self.steps_per_loop = checks.integer("steps_per_loop", steps_per_loop)
        self.accumulation = checks.integer("accumulation", accumulation)
        self.batch_norm = checks.one_of("batch_norm", batch_norm, ("global", "replica"))
        self.remat = checks.one_of("remat", remat, (True, False))
        self.loss = Objective(
            loss,
            loss_weights,
            getattr(model, "output_names", None),
            in_parts=self.accumulation > 1,
        )
        module, steps = _STEPS[checks.backend("`TrainingLoop`", *_STEPS)]
        make_steps = getattr(importlib.import_module(module), steps)
        self._steps: Steps = make_steps(self, strategy, jit_compile)
        self._trained: tuple[Any, list[Any]] | None = None  # optimizer and variables
        with self._steps.scope():
            versions.forget_metrics(model)
            # Not `model.compile`: a model may have one of its own, with other arguments.
            keras.Model.compile(
                model,
                optimizer=optimizer,
                loss=loss,
                loss_weights=loss_weights,
                metrics=metrics or None,
                weighted_metrics=weighted_metrics or None,
            )

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The model's optimizer: the one given, or the `LossScaleOptimizer` around it."""
        return self.model.optimizer

    @property
    def strategy(self) -> Any:
        """The strategy that the loop trains on."""
        return self._steps.strategy

    def per_example_loss(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any]:
        """Compute the loss of each example, and the predictions: the method to override.

        Write it as for one device, in operations of Keras or of the backend. Do not average over
        the examples, nor divide by the number of devices: the loop applies sample weights and Keras
        masks, takes the mean over the complete batch, adds `model.losses`, and differentiates. With
        `accumulation` it is called on micro-batches; then a loss must depend on its own example
        only.

        Args:
            x: Features of the batch.
            y: Labels of the batch; None if the dataset has none.
            training: True in a training step, False in `evaluate`.

        Returns:
            The losses, of shape `(examples,)` or `(examples, ...)`, or for several outputs a
            dictionary of them; and the predictions for the metrics. `self.loss(y, predictions)`
            computes the losses that were passed to the constructor.
        """
        predictions = self.model(x, training=training)
        return self.loss(y, predictions), predictions

    @_guarded
    def fit(
        self,
        train: Any,
        validation: Any = None,
        *,
        epochs: int,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        verbose: int | str = "auto",
    ) -> keras.callbacks.History:
        """Train, and validate after each epoch.

        Args:
            train: A `tf.data.Dataset` or `keras.utils.PyDataset` of batches `x`, `(x, y)` or
                `(x, y, sample_weight)`, each for all devices together; on JAX also a Grain dataset
                or a PyTorch `DataLoader`. Batches may have any size. tf.data's autotuning is off,
                unless the dataset's options set it.
            validation: A dataset to evaluate after each epoch; its logs begin with `val_`.
            epochs: The number of the epoch to end before, as in `keras.Model.fit`.
            callbacks: Keras callbacks, called as by `keras.Model.fit`.
            initial_epoch: The epoch to begin with, from 0.
            steps_per_epoch: Batches in an epoch, which begins where the last one stopped; None
                takes the complete dataset.
            verbose: As in `keras.Model.fit`.

        Returns:
            Keras' `History`.

        Raises:
            ValueError: A dataset that is empty, endless without `steps_per_epoch`, ends within an
                epoch of `steps_per_epoch`, or is not batched.
        """
        epochs = checks.integer("epochs", epochs)
        initial_epoch = checks.integer("initial_epoch", initial_epoch, minimum=0)
        if steps_per_epoch is not None:
            steps_per_epoch = checks.integer("steps_per_epoch", steps_per_epoch)
        feed = self._steps.open(train, "train", steps_per_epoch=steps_per_epoch)
        validation_feed = None
        if validation is not None:
            validation_feed = self._steps.open(validation, "validation", take=None)
        self._steps.build(feed, training=True)
        self._reject_changes()
        all_callbacks = self._callback_list(callbacks, verbose, feed, epochs, add_history=True)
        model, logs = self.model, {}
        model.stop_training = False
        all_callbacks.on_train_begin()
        # BackupAndRestore sets the epoch in which training goes on.
        for epoch in range(getattr(model, "_initial_epoch", None) or initial_epoch, epochs):
            self._steps.reset_metrics()
            all_callbacks.on_epoch_begin(epoch)
            logs = feed.run_epoch(self._steps.train, self.steps_per_loop, all_callbacks, "train")
            if validation_feed:
                results = self._evaluate(validation_feed, all_callbacks)
                logs |= {f"val_{name}": value for name, value in results.items()}
            all_callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        self._steps.finish_training()
        all_callbacks.on_train_end(logs)
        return model.history

    @_guarded
    def evaluate(self, dataset: Any, *, verbose: int | str = "auto") -> dict[str, float]:
        """Compute loss and metrics over all examples of a dataset, each once.

        Args:
            dataset: As `train` in `fit`; an uneven last batch is fine.
            verbose: As in `keras.Model.evaluate`.

        Returns:
            `loss`, for several outputs also the loss of each, and the metrics. A loss is the mean
            of the batches' losses, weighted by their numbers of examples, as in Keras.

        Raises:
            ValueError: As `fit`.
        """
        feed = self._steps.open(dataset, "dataset", take=None)
        self._steps.build(feed, training=False)
        return self._evaluate(feed, self._callback_list((), verbose, feed))

    @_guarded
    def predict(self, dataset: Any, *, verbose: int | str = "auto") -> Any:
        """Predict for every example of a dataset, in its order.

        Args:
            dataset: Batches as in `fit`; labels and weights are ignored.
            verbose: As in `keras.Model.predict`.

        Returns:
            NumPy arrays in the structure of the model's output, one entry for each example.

        Raises:
            ValueError: As `fit`.
        """
        feed = self._steps.open(dataset, "dataset", take=None)
        progress = self._callback_list((), verbose, feed)
        outputs: list[Any] = []

        def predict(batches: Any, steps: int) -> tuple[int, None]:
            done, predictions = self._steps.predict(batches, steps)
            outputs.extend(predictions)
            return done, None

        self.model.stop_predicting = False
        progress.on_predict_begin()
        feed.run_epoch(predict, self.steps_per_loop, progress, "predict")
        progress.on_predict_end()
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _reject_changes(self) -> None:
        """Raise if the step was compiled for another optimizer or other trainable variables."""
        optimizer, variables = self._trained or (self.optimizer, self.model.trainable_variables)
        self._trained = optimizer, variables
        if self.optimizer is not optimizer:
            checks.fail(
                "The model was compiled again since this loop trained it, and has another "
                "optimizer.",
                model=self.model.name,
                remedy="Make a new loop with this optimizer.",
            )
        now = self.model.trainable_variables
        if [*map(id, now)] != [*map(id, variables)]:
            checks.fail(
                "Other weights are trainable than when this loop first trained.",
                then=len(variables),
                now=len(now),
                remedy="Make a new loop and a new optimizer when layers are frozen or unfrozen.",
            )

    def _evaluate(self, feed: Feed, callbacks: Any) -> dict[str, float]:
        self.model.stop_evaluating = False
        callbacks.on_test_begin()
        self._steps.reset_metrics()
        logs = feed.run_epoch(self._steps.test, self.steps_per_loop, callbacks, "test")
        arrays = {name: np.asarray(value) for name, value in logs.items()}
        logs = {name: array if array.ndim else float(array) for name, array in arrays.items()}
        callbacks.on_test_end(logs)
        return logs

    def _callback_list(
        self, callbacks: Any, verbose: Any, feed: Feed, epochs: int = 1, **settings: Any
    ) -> Any:
        verbose = _callbacks.verbosity(verbose)
        return keras.callbacks.CallbackList(
            _callbacks.of_this_process(callbacks),
            add_progbar=verbose != 0,
            model=self.model,
            verbose=verbose,
            epochs=epochs,
            steps=feed.steps,
            metrics=[*self._steps.means],  # `Resume` reads this and the next one.
            steps_at_once=self.steps_per_loop,
            **settings,
        )
