"""What layers are called in PyTorch, Keras and Linen, and what to write here."""

from __future__ import annotations

from collections.abc import Mapping

# Each form, and the names that it stands for.
_BY_FORM: Mapping[str, str] = {
    "nnx.Linear(in_features, out_features, rngs=rngs)": "Dense",
    "nnx.LinearGeneral": "DenseGeneral EinsumDense",
    "nnx.Conv(in_features, out_features, (3,), rngs=rngs)": "Conv1d Conv1D",
    "nnx.Conv(in_features, out_features, (3, 3), rngs=rngs)": "Conv2d Conv2D",
    "nnx.Conv(in_features, out_features, (3, 3, 3), rngs=rngs)": "Conv3d Conv3D",
    "nnx.ConvTranspose": "ConvTranspose1d ConvTranspose2d ConvTranspose3d "
    "Conv1DTranspose Conv2DTranspose Conv3DTranspose",
    "nnx.Embed": "Embedding",
    "nnx.MultiHeadAttention": "MultiheadAttention MultiHeadDotProductAttention",
    "nnx.RNN(nnx.OptimizedLSTMCell(in_features, hidden_features, rngs=rngs))": "LSTM",
    "nnx.RNN(nnx.GRUCell(in_features, hidden_features, rngs=rngs))": "GRU",
    "nnx.RNN(nnx.SimpleCell(in_features, hidden_features, rngs=rngs))": "SimpleRNN",
    "nnx.BatchNorm": "BatchNorm1d BatchNorm2d BatchNorm3d BatchNormalization",
    "nnx.LayerNorm": "LayerNormalization",
    "nnx.RMSNorm": "RMSNormalization",
    "nnx.GroupNorm": "GroupNormalization",
    "nnx.InstanceNorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d",
    "nnx.Dropout": "Dropout1d Dropout2d Dropout3d SpatialDropout2D",
    "nnx.MaxPool((2, 2), strides=(2, 2))": "MaxPool1d MaxPool2d MaxPool3d "
    "MaxPooling1D MaxPooling2D MaxPooling3D",
    "nnx.AvgPool((2, 2), strides=(2, 2))": "AvgPool1d AvgPool2d AvgPool3d "
    "AveragePooling1D AveragePooling2D AveragePooling3D",
    "nnx.GlobalAvgPool()": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d "
    "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D",
    "nnx.GlobalMaxPool()": "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    "GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D",
    "lambda x: x.reshape(len(x), -1)": "Flatten",
    "lambda x: x": "Identity",
    "nnx.List": "ModuleList",
    "nnx.Dict": "ModuleDict",
    "nnx.Param": "Parameter",
    "nnx.relu": "ReLU",
    "nnx.gelu": "GELU",
    "nnx.silu": "SiLU Swish",
    "nnx.tanh": "Tanh",
    "nnx.sigmoid": "Sigmoid",
    "nnx.softmax": "Softmax",
    "nnx.log_softmax": "LogSoftmax",
    "nnx.leaky_relu": "LeakyReLU",
    "nnx.elu": "ELU",
    "optax.softmax_cross_entropy_with_integer_labels": "CrossEntropyLoss",
    "optax.squared_error": "MSELoss",
}
HINTS: Mapping[str, str] = {
    name: form for form, names in _BY_FORM.items() for name in names.split()
}
