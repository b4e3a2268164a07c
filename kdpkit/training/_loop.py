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
    "tensorflow": ("kdpkit.training.tensorflow._parameter_server", "steps_of"),
    "jax": ("kdpkit.training.jax._loop", "JaxSteps"),
}


def _guarded(method: Callable) -> Callable:
    """Let a method's errors be explained where they come from other processes."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **settings: Any) -> Any:
        with self._steps.guard():
            return method(self, *args, **settings)

    return guarded


class TrainingLoop:
    """Trains, evaluates and predicts with a model on R replicas exactly as on one device would.

    Override `per_example_loss` to change what a step does. The rest stays: means over the examples
    of the global batch, an optimizer that works once, metrics over examples, Keras' callbacks,
    `History` and progress line. On TensorFlow a step is traced once, on the global batch, and only
    layers are divided over the devices, as by `replica_exact`. The model is compiled with what is
    given here, so that `model.save` keeps the optimizer's state; a model that was loaded goes on
    with `TrainingLoop(model, optimizer=model.optimizer, loss=...)`. Which layers are trainable is
    looked at when the loop first trains.

    What is exact, and what a loss may depend on: docs/explanation/what_stays_exact.md. Several
    processes: docs/how_to/several_processes.md. Under `ParameterServerStrategy` steps are
    asynchronous: docs/how_to/parameter_servers.md.

    Args:
        model: A Keras model, built in the strategy's scope.
        optimizer: As in `compile`. In `mixed_float16` Keras wraps it in a `LossScaleOptimizer`.
        loss: As in `compile`; none if `per_example_loss` needs none. Its reduction is taken over
            the global batch; `reduction=None` means the mean.
        metrics: As in `compile`.
        strategy: A `tf.distribute` strategy, or on JAX a mesh or a `DataParallel`. None takes the
            strategy of the model, or the distribution that is set in Keras.
        steps_per_loop: Optimizer steps for each call of the compiled function. Callbacks see the
            last step of each call.
        accumulation: Micro-batches that the global batch is split into, each of them divided over
            the devices, to need less memory. The optimizer still makes one step, the same one, for
            each batch. On TensorFlow `fit` raises if a loss or a layer compares examples.
        jit_compile: Whether XLA compiles the training step: on JAX all of it, on TensorFlow the
            forward pass, backward pass and update, on several devices the calls of divided layers.
            `"auto"` is the rule of Keras' `compile`: XLA on JAX, and on TensorFlow where the
            machine has a GPU and the model was built outside any strategy. XLA compiles every new
            shape of a batch again.
        loss_weights: As in `compile`.
        weighted_metrics: As in `compile`; `metrics` do not see sample weights.
        batch_norm: As in `replica_exact`; with `accumulation` it normalizes each micro-batch.
        remat: Whether the backward pass computes the inner activations of blocks again, which need
            then not be kept. Blocks are the layers of the model that have layers of their own, such
            as those of a transformer; of models in the model, their blocks, or they themselves.
            Weights and losses are the same: docs/how_to/shard_variables.md.

    Raises:
        ValueError: A count that is not positive; no loss; a model with a `train_step` or
            `compute_loss` of its own and no `per_example_loss` in the loop; a model
            or an optimizer that was built outside the strategy's scope.

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
        if not has_own_loss:
            _reject_own_step(model)
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
        """Compute the loss of each example, and what the model predicts: the method to override.

        It gets the examples of the global batch, or with `accumulation` those of a micro-batch, of
        which each loss must depend on its own example only. Write it as for one device, in
        operations of Keras or of the backend, and neither average over the examples nor divide by
        replicas: the loop weighs the losses by the sample weights, applies Keras masks, takes the
        mean over the global batch, adds `model.losses`, and differentiates.

        Args:
            x: Features of these examples.
            y: Labels of these examples; None if the dataset has none.
            training: Whether a training step asks; False in `evaluate`.

        Returns:
            The losses, of shape `(examples,)` or `(examples, ...)`, or a dictionary of such for
            several outputs; and the predictions that metrics are computed from. `self.loss(y,
            predictions)` gives the losses that were passed to the constructor.
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
            train: A `tf.data.Dataset` or `keras.utils.PyDataset` of global batches `x`, `(x, y)` or
                `(x, y, sample_weight)`; on JAX also a Grain dataset or a PyTorch `DataLoader`.
                Batches of any size are trained on exactly. Where a dataset's options do not say
                whether tf.data tunes it, it does not.
            validation: A dataset to evaluate after each epoch; its logs begin with `val_`.
            epochs: The number of the epoch to end before.
            callbacks: Keras callbacks, called as by `keras.Model.fit`.
            initial_epoch: The epoch to begin with, from 0.
            steps_per_epoch: Batches in an epoch; None takes all of the dataset. With a
                number, an epoch goes on where the last one stopped.
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
        held_out = validation is not None and self._steps.open(validation, "validation", take=None)
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
            logs = self._go_through(
                feed,
                self._steps.train,
                all_callbacks.on_train_batch_begin,
                all_callbacks.on_train_batch_end,
                lambda: model.stop_training,
            )
            if held_out:
                validated = self._evaluate(held_out, all_callbacks)
                logs |= {f"val_{name}": value for name, value in validated.items()}
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
            `loss`, with several outputs also the loss of each, and the metrics. A loss is that of
            Keras on one device: the mean of the batches' losses, weighted by their examples.

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
            dataset: Batches as in `fit`; labels and weights are not looked at.
            verbose: As in `keras.Model.predict`.

        Returns:
            NumPy arrays in the structure of the model's output, with as many examples as the
            dataset has, on any number of replicas.

        Raises:
            ValueError: As `fit`.
        """
        feed = self._steps.open(dataset, "dataset", take=None)
        progress = self._callback_list((), verbose, feed)
        outputs: list[Any] = []

        def end(batch: int, of_call: list[Any]) -> None:
            outputs.extend(of_call)
            progress.on_predict_batch_end(batch)

        progress.on_predict_begin()
        begin = progress.on_predict_batch_begin
        self._go_through(feed, self._steps.predict, begin, end, lambda: False)
        progress.on_predict_end()
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _reject_changes(self) -> None:
        """Reject to train with what was compiled for another optimizer or other variables."""
        optimizer, variables = self._trained or (self.optimizer, self.model.trainable_variables)
        self._trained = optimizer, variables
        if self.optimizer is not optimizer:
            checks.fail(
                "The model was compiled again since this loop trained it, and has another "
                "optimizer.",
                model=self.model.name,
                remedy="Make a new loop, with the optimizer that is to train.",
            )
        now = self.model.trainable_variables
        if [*map(id, now)] != [*map(id, variables)]:
            checks.fail(
                "Other weights are trainable than when this loop first trained.",
                then=len(variables),
                now=len(now),
                remedy="Make a new loop and a new optimizer when layers are frozen or thawed.",
            )

    def _evaluate(self, feed: Feed, callbacks: Any) -> dict[str, float]:
        self.model.stop_evaluating = False
        callbacks.on_test_begin()
        self._steps.reset_metrics()
        logs = self._go_through(
            feed,
            self._steps.test,
            callbacks.on_test_batch_begin,
            callbacks.on_test_batch_end,
            lambda: self.model.stop_evaluating,
        )
        arrays = {name: np.asarray(value) for name, value in logs.items()}
        logs = {name: array if array.ndim else float(array) for name, array in arrays.items()}
        callbacks.on_test_end(logs)
        return logs

    def _go_through(
        self,
        feed: Feed,
        run: Callable[[Any, int], tuple[int, Any]],
        begin: Callable[[int], None],
        end: Callable[[int, Any], None],
        is_stopped: Callable[[], bool],
    ) -> Any:
        """Run an epoch's steps, many in a call; return the result of the last call."""
        first, result = 0, None
        feed.start_epoch()
        while first != feed.steps:
            count = self.steps_per_loop
            count = count if feed.steps is None else min(count, feed.steps - first)
            begin(first)
            done, of_call = feed.run(run, count)
            if done:
                result = of_call
                end(first + done - 1, result)
            first += done
            if is_stopped():
                return result
            if done < count:
                break
        feed.end_epoch(first)
        return result

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
            metrics=[*self._steps.means],  # these two for `Resume`
            steps_at_once=self.steps_per_loop,
            **settings,
        )


def _reject_own_step(model: Any) -> None:
    for name in ("train_step", "test_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            checks.fail(
                f"The model has a `{name}` of its own, which the loop would not call. Write what "
                "it computes as `per_example_loss` of a subclass of `TrainingLoop`, or train with "
                "`replica_exact(model)` and `fit`.",
                model=type(model).__name__,
            )
