"""torchvision's ResNet-18 on images of your own, or on random ones.

    python train_resnet.py --images photos/ --stages 2     # photos/CLASS/*.jpg
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torchvision import datasets, models, transforms

import gpipe


def loader(folder: Path | None, size: int, samples: int, steps: int):
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            yield (torch.randn(samples, 3, size, size, generator=generator),
                   torch.randint(10, (samples,), generator=generator))
        return
    change = transforms.Compose([transforms.RandomResizedCrop(size),
                                 transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    images = datasets.ImageFolder(str(folder), change)
    made = torch.utils.data.DataLoader(images, samples, shuffle=True, num_workers=2, drop_last=True)
    left = steps
    while left:
        for batch in made:
            yield batch
            left -= 1
            if not left:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    classes = 10 if options.images is None else len(list(options.images.iterdir()))
    model = models.resnet18(num_classes=classes)
    # The forward of torchvision's ResNet, as the sequence that it is.
    sequence = gpipe.sequence(model, ["conv1", "bn1", "relu", "maxpool", "layer1.*", "layer2.*",
                                      "layer3.*", "layer4.*", "avgpool", nn.Flatten(), "fc"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    example = torch.zeros(options.samples, 3, options.size, options.size)
    with gpipe.Pipeline(sequence, example, stages=options.stages,
                        micro_batches=options.micro_batches,
                        loss=nn.CrossEntropyLoss(label_smoothing=0.1), optimizer=optimizer) as pipe:
        print("layers per stage", pipe.balance)
        for x, y in loader(options.images, options.size, options.samples, options.steps):
            report = pipe.train_step(x, y)
            print(f"step {report.step:4}  loss {report.loss:.3f}  {1e3 * report.time:.0f} ms")
        print(f"evaluation {pipe.evaluate(x, y).loss:.3f}")
    # The model itself was trained, under torchvision's names.
    assert int(model.bn1.num_batches_tracked) == options.steps


if __name__ == "__main__":
    main()
