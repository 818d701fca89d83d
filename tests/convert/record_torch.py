"""Records files of torch.save: python -m tests.convert.record_torch (needs torch; goldens/torch is of PyTorch 2.13)."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "goldens" / "torch"


def main() -> None:
    import torch

    torch.manual_seed(0)
    tensors = {
        "a.weight": torch.randn(6, 4),
        "a.bias": torch.randn(5).to(torch.bfloat16),
        "half": torch.randn(2, 3, 2).to(torch.float16),
        "mask": torch.tensor([[True, False], [False, True]]),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }
    FOLDER.mkdir(exist_ok=True)
    module = torch.nn.Module()
    for number, tensor in enumerate(tensors.values()):
        module.register_buffer(f"buffer_{number}", tensor)
    state = module.state_dict()  # an OrderedDict with versions of modules
    for number, name in enumerate(tensors):
        state[name] = state.pop(f"buffer_{number}")
    torch.save(state, FOLDER / "plain.bin")
    turned = {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    base = torch.cat([torch.zeros(3), tensors["a.weight"].flatten()])
    torch.save(turned | {"a.weight": base[3:].view(6, 4)}, FOLDER / "transposed.bin")
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    torch.save(parameters, FOLDER / "parameters.bin")
    torch.save(tensors, FOLDER / "protocol_4.bin", pickle_protocol=4)
    arrays = {name: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    np.savez(FOLDER / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
