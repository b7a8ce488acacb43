// The order of blocks in a matrix of strips: common/strips.cuh.
#pragma once

#include "host_device.cuh"

/// Strips of a band.
constexpr int BAND = 8;

/// The place of block number `block` of strip `strip`, counted in blocks; `strips` and `blocks`: of the matrix, and of a
/// strip. Those of the strips behind it, up to the end of the band, follow.
HOST_DEVICE size_t place_of_block(int strips, int blocks, int strip, int block) {
    const int first = strip / BAND * BAND, left = strips - first, across = left < BAND ? left : BAND;
    return size_t(first) * blocks + block * across + strip % BAND;
}
