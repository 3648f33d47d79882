// Eigen as a peer: y = A x and C = A B for matrices that lie in rows or in columns; C lies in rows.
// Eigen's default order is by columns: a row-major matrix must be mapped as one, else this is B A.
#include <Eigen/Dense>

namespace {
using Index = Eigen::Index;
template <class T> using Rows = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T> using Cols = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
template <class T> using Vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;
template <class M> using In = Eigen::Map<const M>;

template <class A, class T> void mv(const T* a, const T* x, T* y, Index m, Index n) {
  Eigen::Map<Vector<T>>(y, m).noalias() = In<A>(a, m, n) * In<Vector<T>>(x, n);
}
template <class A, class B, class T>
void mm(const T* a, const T* b, T* c, Index m, Index n, Index k) {
  Eigen::Map<Rows<T>>(c, m, n).noalias() = In<A>(a, m, k) * In<B>(b, k, n);
}
template <class T> void matvec(const T* a, const T* x, T* y, Index m, Index n, int a_rows) {
  a_rows ? mv<Rows<T>>(a, x, y, m, n) : mv<Cols<T>>(a, x, y, m, n);
}
template <class T>
void matmul(const T* a, const T* b, T* c, Index m, Index n, Index k, int a_rows, int b_rows) {
  if (a_rows) b_rows ? mm<Rows<T>, Rows<T>>(a, b, c, m, n, k) : mm<Rows<T>, Cols<T>>(a, b, c, m, n, k);
  else b_rows ? mm<Cols<T>, Rows<T>>(a, b, c, m, n, k) : mm<Cols<T>, Cols<T>>(a, b, c, m, n, k);
}
}  // namespace

#define EXPORT(NAME, T)                                                                        \
  void matvec_##NAME(const T* a, const T* x, T* y, Index m, Index n, int a_rows) {             \
    matvec<T>(a, x, y, m, n, a_rows);                                                          \
  }                                                                                            \
  void matmul_##NAME(const T* a, const T* b, T* c, Index m, Index n, Index k, int ar, int br) { \
    matmul<T>(a, b, c, m, n, k, ar, br);                                                       \
  }
extern "C" {
EXPORT(float32, float)
EXPORT(float64, double)
int threads() { return Eigen::nbThreads(); }
int version() { return EIGEN_WORLD_VERSION * 10000 + EIGEN_MAJOR_VERSION * 100 + EIGEN_MINOR_VERSION; }
}
