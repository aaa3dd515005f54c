"""The distribution of the mean of rounds, by matrices and by adding up densities: an independent `interval.py`."""

import itertools
import math

import numpy as np

PHIS, WEIGHTS = (0.0, 0.3, 0.6, 0.95), (2, 2, 2, 3)


def parts(values):
    """The weight, mean and scale of each memory's Student's t."""
    x = np.asarray(values, float)
    n, ones, found = x.size, np.ones(len(values)), []
    for phi, prior in zip(PHIS, WEIGHTS, strict=True):
        correlation = phi ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
        inverse = np.linalg.inv(correlation)
        norm = ones @ inverse @ ones
        mean = ones @ inverse @ x / norm
        squares = (x - mean) @ inverse @ (x - mean)
        weight = prior / math.sqrt(np.linalg.det(correlation) * norm) * squares ** (-(n - 1) / 2)
        found.append((weight, mean, math.sqrt(squares / (n - 1) / norm)))
    total = sum(weight for weight, _, _ in found)
    return [(weight / total, mean, scale) for weight, mean, scale in found]


def within(values, half, about=None):
    """The probability that the mean is within `half` of the rounds' mean, or of `about`."""
    centre, degrees = (np.mean(values) if about is None else about), len(values) - 1
    constant = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(math.pi * degrees)
    total = 0.0
    for weight, mean, scale in parts(values):
        # In t's own units, by Gauss and Legendre.
        low, high = ((centre + sign * half - mean) / scale for sign in (-1, 1))
        at, share = np.polynomial.legendre.leggauss(60)
        edges = np.linspace(math.asinh(low), math.asinh(high), 41)
        for left, right in itertools.pairwise(edges):
            u = (left + right) / 2 + (right - left) / 2 * at
            t = np.sinh(u)
            density = constant * (1 + t * t / degrees) ** (-(degrees + 1) / 2) * np.cosh(u)
            total += weight * (right - left) / 2 * float(share @ density)
    return total


def half_width(values, about=None):
    """The half-width of the 95 % interval, by bisection."""
    low, high = 0.0, 100 * float(np.ptp(values))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(values, middle, about) < 0.95 else (low, middle)
    return high
