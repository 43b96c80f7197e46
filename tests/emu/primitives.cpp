// The larger primitives of warp.h. Compiled once, not instrumented: their accesses of shared and device memory are
// reported here.
#include <cmath>
#include <cstring>
#include "observe.h"
#include "runner.h"
#include "warp.h"

namespace emu {

// ------------------------------------------------------------------------------------------------ tensor cores

typedef float Row __attribute__((vector_size(32)));  // eight columns
typedef int IntRow __attribute__((vector_size(32)));

struct Bf16 {
    static float low(uint32_t pair) { return high(pair << 16); }
    static float high(uint32_t pair) {
        pair &= 0xffff0000u;
        float x;
        memcpy(&x, &pair, sizeof x);
        return x;
    }
};
struct F16 {
    static float low(uint32_t pair) { return f16_to_float(uint16_t(pair)); }
    static float high(uint32_t pair) { return f16_to_float(uint16_t(pair >> 16)); }
};

struct Fragments {
    float* d;
    const uint32_t *a, *b;
};

// Stores the rows of `d` in the fragments of the lanes.
template <class Lane, class D>
static void store(void** slots, const D& d) {
    for (unsigned lane = 0; lane < WARP; lane++) {
        const Lane& f = *static_cast<Lane*>(slots[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 2; i++) f.d[i] = d[g][t * 2 + i], f.d[2 + i] = d[g + 8][t * 2 + i];
    }
}

// d += a * b. The sums are of doubles, so their order does not change the result, unless exponents are very far apart.
static void add_products(Row (&d)[16], const float (&a_even)[16][8], const float (&a_odd)[16][8], const Row (&even)[8],
                         const Row (&odd)[8]) {
    typedef double WideRow __attribute__((vector_size(64)));
    WideRow wide_even[8], wide_odd[8];
    for (unsigned k = 0; k < 8; k++) {
        wide_even[k] = __builtin_convertvector(even[k], WideRow);
        wide_odd[k] = __builtin_convertvector(odd[k], WideRow);
    }
    for (unsigned m = 0; m < 16; m++) {
        WideRow sum = __builtin_convertvector(d[m], WideRow), sum_odd = {};
        for (unsigned k = 0; k < 8; k++) {
            sum += double(a_even[m][k]) * wide_even[k];
            sum_odd += double(a_odd[m][k]) * wide_odd[k];
        }
        d[m] = __builtin_convertvector(sum + sum_odd, Row);
    }
}

// Lane i holds rows i/4 and i/4+8 of `a` and `d`, and column i/4 of `b`; its pairs of elements are i%4 and i%4+4.
template <class Type>
static void multiply(void** slots, unsigned lanes) {
    if (lanes != ALL_LANES) fail("mma needs all lanes of the warp");
    uint32_t a[16][8];  // pairs of elements
    float a_even[16][8], a_odd[16][8];
    Row even[8], odd[8], d[16];
    for (unsigned lane = 0; lane < WARP; lane++) {
        const Fragments& f = *static_cast<Fragments*>(slots[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        a[g][t] = f.a[0], a[g + 8][t] = f.a[1], a[g][t + 4] = f.a[2], a[g + 8][t + 4] = f.a[3];
        for (unsigned i = 0; i < 2; i++) {
            even[t + 4 * i][g] = Type::low(f.b[i]), odd[t + 4 * i][g] = Type::high(f.b[i]);
            d[g][t * 2 + i] = f.d[i], d[g + 8][t * 2 + i] = f.d[2 + i];
        }
    }
    for (unsigned m = 0; m < 16; m++)
        for (unsigned k = 0; k < 8; k++) a_even[m][k] = Type::low(a[m][k]), a_odd[m][k] = Type::high(a[m][k]);
    add_products(d, a_even, a_odd, even, odd);
    store<Fragments>(slots, d);
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
    Fragments mine{d, a, b};
    collective(ALL_LANES, &mine, multiply<Bf16>, file, line);
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
    Fragments mine{d, a, b};
    collective(ALL_LANES, &mine, multiply<F16>, file, line);
}

template <class Sum>
struct ByteFragments {
    Sum* d;
    const uint32_t *a, *b;
};

struct Int8 {
    using Sum = int;
    static int of(uint8_t byte) { return int8_t(byte); }
};
struct E4m3 {
    using Sum = float;
    static float of(uint8_t byte) {
        const int exponent = byte >> 3 & 15, mantissa = byte & 7;
        if ((byte & 127) == 127) return NAN;
        const float magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        return byte & 128 ? -magnitude : magnitude;
    }
};

// Lane i holds rows i/4 and i/4+8 of `a` and `d`, and column i/4 of `b`; its fours of elements are i%4 and, of the
// longer form, i%4+4.
template <class Type, unsigned FOURS>
static void multiply_bytes(void** slots, unsigned lanes) {
    using Lane = ByteFragments<typename Type::Sum>;
    if (lanes != ALL_LANES) fail("mma needs all lanes of the warp");
    typename Type::Sum a[16][4 * FOURS], b[4 * FOURS][8], d[16][8];
    for (unsigned lane = 0; lane < WARP; lane++) {
        const Lane& f = *static_cast<Lane*>(slots[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned n = 0; n < FOURS / 4; n++)
            for (unsigned i = 0; i < 4; i++) {
                const unsigned k = 16 * n + 4 * t + i;
                auto element = [&](uint32_t word) { return Type::of(word >> 8 * i); };
                a[g][k] = element(f.a[2 * n]), a[g + 8][k] = element(f.a[2 * n + 1]), b[k][g] = element(f.b[n]);
            }
        for (unsigned i = 0; i < 2; i++) d[g][t * 2 + i] = f.d[i], d[g + 8][t * 2 + i] = f.d[2 + i];
    }
    for (unsigned m = 0; m < 16; m++)
        for (unsigned k = 0; k < 4 * FOURS; k++)
            for (unsigned n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    store<Lane>(slots, d);
}

void mma_int8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
    ByteFragments<int> mine{d, a, b};
    collective(ALL_LANES, &mine, multiply_bytes<Int8, 8>, file, line);
}

void mma_int8(int (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1], const char* file, int line) {
    ByteFragments<int> mine{d, a, b};
    collective(ALL_LANES, &mine, multiply_bytes<Int8, 4>, file, line);
}

void mma_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
    ByteFragments<float> mine{d, a, b};
    collective(ALL_LANES, &mine, multiply_bytes<E4m3, 8>, file, line);
}

struct MatrixRow {
    const void* row;
    uint32_t* fragments;
};

// Lane i receives elements 2(i%4) and 2(i%4)+1 of row i/4 of every matrix, or of column i/4 if transposed.
template <bool is_transposed>
static void load(void** slots, unsigned lanes) {
    if (lanes != ALL_LANES) fail("ldmatrix needs all lanes of the warp");
    for (unsigned n = 0; n < 4; n++) {
        uint16_t elements[8][8];
        for (unsigned r = 0; r < 8; r++)
            memcpy(elements[r], static_cast<MatrixRow*>(slots[n * 8 + r])->row, sizeof elements[r]);
        for (unsigned lane = 0; lane < WARP; lane++) {
            const unsigned g = lane / 4, t = lane % 4 * 2;
            const uint16_t low = is_transposed ? elements[t][g] : elements[g][t];
            const uint16_t high = is_transposed ? elements[t + 1][g] : elements[g][t + 1];
            static_cast<MatrixRow*>(slots[lane])->fragments[n] = uint32_t(high) << 16 | low;
        }
    }
}

static void check_row(const void* row, void* pc) {
    if (uintptr_t(row) % 16) fail_at(pc, "ldmatrix: a row of 16 bytes is not aligned");
    observe(row, 16, READ, pc);
}

void load_matrices(uint32_t (&fragments)[4], const void* row, const char* file, int line) {
    check_row(row, __builtin_return_address(0));
    MatrixRow mine{row, fragments};
    collective(ALL_LANES, &mine, load<false>, file, line);
}

void load_matrices_transposed(uint32_t (&fragments)[4], const void* row, const char* file, int line) {
    check_row(row, __builtin_return_address(0));
    MatrixRow mine{row, fragments};
    collective(ALL_LANES, &mine, load<true>, file, line);
}

// --------------------------------------------------------------------------------------- products of a warpgroup

// The 16 bytes of a row of a tile that hold the columns 8 word to 8 word + 7: rows have 128 bytes, and are swizzled.
static const char* word_of(const void* tile, unsigned row, unsigned word) {
    return static_cast<const char*>(tile) + 128 * row + 16 * (word ^ row % 8);
}

// The even and the odd elements of a row's 16 columns.
template <class Type>
static void read_row(const void* tile, unsigned row, unsigned part, float (&even)[8], float (&odd)[8]) {
    for (unsigned half = 0; half < 2; half++) {
        uint32_t pairs[4];
        memcpy(pairs, word_of(tile, row, 2 * part + half), sizeof pairs);
        for (unsigned i = 0; i < 4; i++)
            even[4 * half + i] = Type::low(pairs[i]), odd[4 * half + i] = Type::high(pairs[i]);
    }
}

// The even and the odd elements of row `row` of the 16 rows in the registers of a warp.
template <class Type>
static void read_registers(const uint32_t (&a)[WARP][4], unsigned row, float (&even)[8], float (&odd)[8]) {
    for (unsigned i = 0; i < 8; i++) {
        const uint32_t pair = a[row % 8 * 4 + i % 4][row / 8 + i / 4 * 2];
        even[i] = Type::low(pair), odd[i] = Type::high(pair);
    }
}

// Changes the sums of a tile of 8 rows of `b`.
template <class Sum, class Sums, class Change>
static void change_sums(const Products::Product& p, unsigned tile, Change change) {
    Sums d[16];
    auto element = [&](unsigned lane, unsigned e) -> Sum& { return static_cast<Sum*>(p.d[lane])[4 * tile + e]; };
    for (unsigned lane = 0; lane < WARP; lane++)
        for (unsigned e = 0; e < 4; e++)
            d[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2] = p.adds ? element(lane, e) : Sum(0);
    change(d);
    for (unsigned lane = 0; lane < WARP; lane++)
        for (unsigned e = 0; e < 4; e++) element(lane, e) = d[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
}

template <class Type>
static void execute(const Products::Product& p, unsigned first_row) {
    float a_even[16][8], a_odd[16][8];
    for (unsigned m = 0; m < 16; m++) {
        if (p.a) read_row<Type>(p.a, first_row + m, p.part, a_even[m], a_odd[m]);
        else read_registers<Type>(p.a_values, m, a_even[m], a_odd[m]);
    }
    for (unsigned tile = 0; tile < p.rows / 8; tile++) {
        Row even[8], odd[8];
        for (unsigned n = 0; n < 8; n++) {
            float row_even[8], row_odd[8];
            read_row<Type>(p.b, 8 * tile + n, p.part, row_even, row_odd);
            for (unsigned k = 0; k < 8; k++) even[k][n] = row_even[k], odd[k][n] = row_odd[k];
        }
        change_sums<float, Row>(p, tile, [&](Row (&d)[16]) { add_products(d, a_even, a_odd, even, odd); });
    }
}

static void execute_bytes(const Products::Product& p) {
    int8_t a[16][32];
    for (unsigned m = 0; m < 16; m++)
        for (unsigned k = 0; k < 32; k += 4)
            memcpy(&a[m][k], &p.a_values[m % 8 * 4 + k / 4 % 4][m / 8 + k / 16 * 2], 4);
    for (unsigned tile = 0; tile < p.rows / 8; tile++) {
        IntRow b[32];
        for (unsigned n = 0; n < 8; n++)
            for (unsigned half = 0; half < 2; half++) {
                const char* bytes = word_of(p.b, 8 * tile + n, 2 * p.part + half);
                for (unsigned k = 0; k < 16; k++) b[16 * half + k][n] = int8_t(bytes[k]);
            }
        change_sums<int, IntRow>(p, tile, [&](IntRow (&d)[16]) {
            for (unsigned m = 0; m < 16; m++)
                for (unsigned k = 0; k < 32; k++) d[m] += int(a[m][k]) * b[k];
        });
    }
}

// Begins a product. A lane has its own sums, and its own registers of the first operand.
static void begin_product(Products::Product mine, void* d, const uint32_t* a_words, const char* file, int line) {
    if ((uintptr_t(mine.a) | uintptr_t(mine.b)) % 1024)
        fail_at(mine.pc, "wgmma: a tile is not aligned to 1024 bytes");
    mine.d[0] = d, mine.a_words[0] = a_words;
    collective(ALL_LANES, &mine, [](void** slots, unsigned lanes) {
        if (lanes != ALL_LANES) fail("wgmma needs all lanes of the warp");
        Products& products = runner->products[self->warp->number];
        if (!products.has_begun) fail("wgmma before begin_products");
        Products::Product product = *static_cast<Products::Product*>(slots[0]);
        for (unsigned lane = 0; lane < WARP; lane++) {
            const Products::Product& part = *static_cast<Products::Product*>(slots[lane]);
            if (part.a != product.a || part.b != product.b || part.part != product.part || part.adds != product.adds)
                fail("wgmma: the lanes of a warp have different operands");
            product.d[lane] = part.d[0], product.a_words[lane] = part.a_words[0];
            if (!product.a) memcpy(product.a_values[lane], part.a_words[0], sizeof product.a_values[lane]);
        }
        products.pending.push_back(product);
    }, file, line);
}

void multiply_tiles(float* d, unsigned rows, const void* a, const void* b, unsigned part, bool is_f16, const char* file,
                    int line) {
    const Products::Type type = is_f16 ? Products::F16 : Products::BF16;
    begin_product({a, b, rows, part, type, true, __builtin_return_address(0)}, d, nullptr, file, line);
}

void multiply_registers(float* d, unsigned rows, const uint32_t (&a)[4], const void* b, unsigned part, bool adds,
                        bool is_f16, const char* file, int line) {
    const Products::Type type = is_f16 ? Products::F16 : Products::BF16;
    begin_product({nullptr, b, rows, part, type, adds, __builtin_return_address(0)}, d, a, file, line);
}

void multiply_registers(int* d, unsigned rows, const uint32_t (&a)[4], const void* b, unsigned part, bool adds, bool,
                        const char* file, int line) {
    begin_product({nullptr, b, rows, part, Products::INT8, adds, __builtin_return_address(0)}, d, a, file, line);
}

void products_see_writes() {
    if (const Observer* observer = block->observer) observer->products_see_writes(self->linear, block->interval);
}

void begin_products(const char* file, int line) {
    collective(ALL_LANES, self, [](void**, unsigned) { runner->products[self->warp->number].has_begun = true; }, file,
               line);
}

void commit_products(const char* file, int line) {
    collective(ALL_LANES, self, [](void**, unsigned) {
        Products& products = runner->products[self->warp->number];
        products.groups.push_back(products.pending.size());
        products.has_begun = false;
    }, file, line);
}

void wait_for_products(unsigned pending, const char* file, int line) {
    collective(ALL_LANES, &pending, [](void** slots, unsigned) {
        Products& all = runner->products[self->warp->number];
        const unsigned pending = *static_cast<unsigned*>(slots[self->lane]);
        if (all.groups.size() <= pending) return;
        const size_t groups = all.groups.size() - pending, count = all.groups[groups - 1];
        const unsigned first_row = self->warp->number % 4 * 16;
        for (size_t i = 0; i < count; i++) {
            const Products::Product& p = all.pending[i];
            for (unsigned half = 0; half < 2; half++) {
                const unsigned word = 2 * p.part + half;
                for (unsigned m = 0; p.a && m < 16; m++)
                    observe(word_of(p.a, first_row + m, word), 16, PRODUCT_READ, p.pc);
                for (unsigned n = 0; n < p.rows; n++) observe(word_of(p.b, n, word), 16, PRODUCT_READ, p.pc);
            }
            for (unsigned lane = 0; !p.a && lane < WARP; lane++)
                if (memcmp(p.a_words[lane], p.a_values[lane], sizeof p.a_values[lane]))
                    fail_at(p.pc, "wgmma: registers of an operand were written before the wait");
            if (p.type == Products::INT8) execute_bytes(p);
            else if (p.type == Products::F16) execute<F16>(p, first_row);
            else execute<Bf16>(p, first_row);
        }
        all.pending.erase(all.pending.begin(), all.pending.begin() + count);
        all.groups.erase(all.groups.begin(), all.groups.begin() + groups);
        for (size_t& end : all.groups) end -= count;
    }, file, line);
}

// ------------------------------------------------------------------------------------------- asynchronous copies

static Copies& own_copies() {
    runner->any_copies = true;
    return runner->copies[self->linear];
}

void copy_async(void* to, const void* from, unsigned size, unsigned filled) {
    void* pc = __builtin_return_address(0);
    Copies& c = own_copies();
    if (size != 4 && size != 8 && size != 16) fail_at(pc, "cp.async of %u bytes; 4, 8 and 16 exist", size);
    if (filled > size) fail_at(pc, "cp.async reads %u of %u bytes", filled, size);
    if ((uintptr_t(to) | uintptr_t(from)) % size) fail_at(pc, "cp.async: an address is not aligned to %u bytes", size);
    if (c.num_copies == Copies::MAX_COPIES)
        fail_at(pc, "more than %u asynchronous copies are pending in a thread", Copies::MAX_COPIES);
    observe(to, size, PENDING, pc);
    memset(to, 0xff, size);
    c.copies[c.num_copies++] = {to, from, uint16_t(size), uint16_t(filled)};
}

void copy_commit() {
    Copies& c = own_copies();
    if (c.num_groups == Copies::MAX_GROUPS)
        fail_at(__builtin_return_address(0), "more than %u groups of asynchronous copies are pending",
                Copies::MAX_GROUPS);
    c.groups[c.num_groups++] = c.num_copies;
}

void copy_wait(unsigned pending) {
    void* pc = __builtin_return_address(0);
    Copies& c = own_copies();
    if (c.num_groups <= pending) return;
    const unsigned groups = c.num_groups - pending, copies = c.groups[groups - 1];
    for (unsigned i = 0; i < copies; i++) {
        const Copies::Copy& copy = c.copies[i];
        if (copy.filled) observe(copy.from, copy.filled, READ, pc);
        observe(copy.to, copy.size, WRITE, pc);
        memcpy(copy.to, copy.from, copy.filled);
        memset(static_cast<char*>(copy.to) + copy.filled, 0, copy.size - copy.filled);
    }
    memmove(c.copies, c.copies + copies, (c.num_copies - copies) * sizeof(Copies::Copy));
    c.num_copies -= copies;
    for (unsigned i = groups; i < c.num_groups; i++) c.groups[i - groups] = c.groups[i] - copies;
    c.num_groups = pending;
}

}  // namespace emu
