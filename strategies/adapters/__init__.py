"""What is trained: small matrices beside the layers' own, which stay as they are.

Full training holds a gradient and two moments for each parameter; adapters hold them for some hundredths of the
parameters, so that the frozen model itself and the activations are what is left. `lora` keeps the model in the type in
which it is drawn, `qlora` in 4 bits. Both are other models than full training: they are judged against themselves
alone, so that what is combined with them must leave their answer as it is. Name them before the optimizer of a row.
"""
