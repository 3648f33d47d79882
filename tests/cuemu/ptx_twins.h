// The CPU twins of the primitives of ptx.cuh, which includes this file. Same names, same layouts; asynchronous
// instructions take effect as late as allowed (async.h), and what the hardware forbids is reported.
#pragma once
#include "twin_memory.h"
#include "twin_barrier.h"
#include "twin_tma.h"
#include "twin_mma.h"
#include "twin_wgmma.h"
