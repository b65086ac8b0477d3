"""Finds speech in a recording, with the weights of Silero's voice activity detector.

``python -m examples.speech`` takes the recording that is here, or a WAV file of yours.
It prints where somebody speaks, and draws the waveform with the probability of speech
below it. The picture needs the extra ``demo``.

The weights are a safetensors file in the wheel of ``silero-vad`` 6.2.3 on PyPI (MIT
licence). pip downloads that wheel once, to ``out/silero-vad``. Nothing of it is
installed or run, and it is refused if its SHA-256 is not the one in ``pretrained``.
``--weights`` takes the file from elsewhere.

- ``model``: the network, its table of weights, and the loop over a recording.
- ``pretrained``: the files of the wheel, and the model with its weights.
- ``recordings``: reads WAV files; ``segments``: from probabilities to times.
- ``comparison``: the same network as an ONNX file, run by onnxruntime.
- ``report``: the picture; ``__main__``: the command line.
- ``make_recording.sh``: how ``recording.wav`` was made, with espeak-ng and SoX.

``--compare`` also runs the ONNX file of the wheel in onnxruntime, and fails if a
probability differs by more than 1e-4. All ONNX files of the wheel hold other weights
than its safetensors file; for our recording, probabilities differ by up to 0.23. So
each set of weights is compared with itself: the tensors of the safetensors file are put
into the ONNX graph, and the tensors of the ONNX file are loaded into the model.
"""
