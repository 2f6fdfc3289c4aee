"""The matching rules and the branch once more, slowly and to the letter: loops over the tokens of one image.

A merge is written as the list of new tokens, each the list of old positions it is made of. Nothing here is shared with
the library.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Groups = list[list[int]]


def cosine(x: Sequence[float], y: Sequence[float]) -> float:
    length = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / max(length, 1e-12)


def similarities(tokens: Tensor) -> list[list[float]]:
    rows = tokens.double().tolist()
    return [[cosine(x, y) for y in rows] for x in rows]


def best(row: Sequence[float], candidates: Sequence[int]) -> int:
    """The first of the candidates with the highest score."""
    winner = candidates[0]
    for candidate in candidates:
        if row[candidate] > row[winner]:
            winner = candidate
    return winner


def highest_first(items: Sequence[int], score: dict[int, float]) -> list[int]:
    """By descending score; equal ones stay in their order (Python's sort is stable)."""
    return sorted(items, key=lambda item: -score[item])


def even_and_odd(length: int, num_prefix: int) -> tuple[list[int], list[int]]:
    a, b = [], []
    place = 1 if num_prefix else 0  # the prefix as a whole is position 0
    for token in range(num_prefix, length):
        (b if place % 2 else a).append(token)
        place += 1
    return a, b


def into_partners(kept: Sequence[int], b: Sequence[int], partner: dict[int, int], num_prefix: int) -> Groups:
    """New order: prefix, kept, b; each b with the tokens that chose it."""
    groups = [[token] for token in range(num_prefix)] + [[token] for token in kept]
    return groups + [[token, *(source for source in partner if partner[source] == token)] for token in b]


def tome(metric: Tensor, r: int, num_prefix: int) -> Groups:
    sim = similarities(metric)
    a, b = even_and_odd(len(metric), num_prefix)
    partner = {token: best(sim[token], b) for token in a} if b else {}
    score = {token: sim[token][partner[token]] for token in partner}
    merging = highest_first(list(partner), score)[: min(r, (len(metric) - num_prefix) // 2)]
    return into_partners(
        [token for token in a if token not in merging], b, {t: partner[t] for t in merging}, num_prefix
    )


def pitome(metric: Tensor, r: int, margin: float, protect: bool, num_prefix: int) -> Groups:
    if r == 0:  # no event, so no new order either
        return [[token] for token in range(len(metric))]
    sim = similarities(metric)
    patches = list(range(num_prefix, len(metric)))
    energy = {}
    for i in patches:
        terms = [sim[i][j] - margin for j in patches]
        energy[i] = sum(t if t > 0 else math.exp(t) - 1 for t in terms) / len(patches)
    rank = highest_first(patches, energy)
    part = rank[: 2 * r] if protect else rank
    a, b = part[0::2], part[1::2]
    partner = {token: best(sim[token], b) for token in a}
    order = highest_first(a, {token: sim[token][partner[token]] for token in a})
    if protect:
        return into_partners(rank[2 * r :], b, partner, num_prefix)
    return into_partners(order[r:], b, {token: partner[token] for token in order[:r]}, num_prefix)


def mpm(tokens: Tensor, num_prefix: int) -> Groups:
    sim = similarities(tokens)
    patches = list(range(num_prefix, len(tokens)))
    if len(patches) < 2:
        return [[token] for token in range(len(tokens))]
    nearest = {i: best(sim[i], [j for j in patches if j != i]) for i in patches}
    groups = [[token] for token in range(num_prefix)]
    for i in patches:
        j = nearest[i]
        if nearest[j] != i:
            groups.append([i])
        elif i < j:
            groups.append([i, j])
    return groups


def algm_local(tokens: Tensor, grid: tuple[int, int], threshold: float, num_prefix: int) -> Groups:
    sim = similarities(tokens)
    window_of: dict[int, list[int]] = {}
    for row in range(0, grid[0] - 1, 2):
        for column in range(0, grid[1] - 1, 2):
            corner = num_prefix + row * grid[1] + column
            window = [corner, corner + 1, corner + grid[1], corner + grid[1] + 1]
            pairs = [sim[i][j] for i in window for j in window if i != j]
            if sum(pairs) / len(pairs) >= threshold:
                window_of.update(dict.fromkeys(window, window))
    groups = []
    for token in range(len(tokens)):
        window = window_of.get(token, [token])
        if token == window[0]:
            groups.append(window)
    return groups


def algm_global(tokens: Tensor, threshold: float, num_prefix: int) -> Groups:
    sim = similarities(tokens)
    a, b = even_and_odd(len(tokens), num_prefix)
    if not a or not b:
        return [[token] for token in range(len(tokens))]
    partner = {token: best(sim[token], b) for token in a}
    partner = {token: chosen for token, chosen in partner.items() if sim[token][chosen] >= threshold}
    return into_partners([token for token in a if token not in partner], b, partner, num_prefix)


def weights(groups: Groups, size: Sequence[float]) -> dict[int, float]:
    return {token: size[token] / sum(size[member] for member in group) for group in groups for token in group}


def branch_codes(module: torch.nn.Module, x: Tensor, groups: Groups, weight: dict[int, float]) -> tuple[Tensor, Tensor]:
    """Codes ``[N, R]`` and feature update ``[G, D]`` of the token branch, from its layers, one member at a time."""
    codes = x.new_zeros(len(x), module.encoder.out_features)
    updates = []
    for group in groups:
        y = sum(weight[i] * x[i] for i in group)
        if len(group) > 1:
            for i in group:
                z = x[i] - y
                u = module.norm.weight * z / torch.sqrt(z.square().mean() + 1e-6)
                hidden = module.gate_in(torch.cat([u, module.norm_x(x[i]), module.norm_y(y)]))
                gate = torch.sigmoid(module.gate_out(torch.nn.functional.gelu(hidden)))
                codes[i] = gate * module.encoder(u)
        updates.append(module.decoder(sum(weight[i] * codes[i] for i in group)))
    return codes, torch.stack(updates)
